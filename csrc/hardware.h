// What this machine can do: instruction sets, bandwidth, arithmetic.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

// Names of the instruction sets that both this build and this processor have, best
// last.
std::vector<std::string> available_isas();
// The table of the named one; empty: the best. Throws std::invalid_argument for a name
// that is not available.
const Kernels* kernels_for(const std::string& isa);
// Bytes per second of reading `bytes` of memory with all threads, the median of a few
// passes.
double read_bandwidth(int threads, size_t bytes);
// Operations per second (a multiply-add is two) of "int8", "bf16" or "f32" dot products
// with all threads.
double dot_rate(const std::string& kind, int threads);

}  // namespace headrace
