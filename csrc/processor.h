// The instruction sets of this processor.
#pragma once
#include <string>
#include <vector>

namespace headrace {

// Names of the instruction sets that kernels exist for and this processor has, best
// last.
std::vector<std::string> processor_isas();

}  // namespace headrace
