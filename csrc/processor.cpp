#include "processor.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace headrace {

// __builtin_cpu_supports also asks the operating system whether it saves the wide
// registers.
std::vector<std::string> processor_isas() {
  std::vector<std::string> names{"portable"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return names;
  names.push_back("avx2");
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vnni"))
    return names;
  names.push_back("avx512");
  if (__builtin_cpu_supports("avx512bf16")) names.push_back("avx512bf16");
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) names.push_back("neon");
#endif
  return names;
}

}  // namespace headrace

#ifdef HEADRACE_PRINT_ISA
// CMake runs this to compile for the machine that it is on.
#include <cstdio>
int main() {
  const auto names = headrace::processor_isas();
  if (names.size() > 1) std::fputs(names.back().c_str(), stdout);
}
#endif
