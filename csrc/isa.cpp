// The kernels of one instruction set. CMake compiles this file twice for each, with its flags and
//   HR_ISA      its name, such as avx2,
//   HR_SIMD     the header of its vectors,
//   HR_INTEGER  1: the integer matrix kernels, 0: all other kernels, and the table.
// The two units take two cores about equally long.
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstring>

#include "codes.h"
#include "half.h"
#include "kernels.h"
#include "sparse.h"

#define HR_INLINE inline __attribute__((always_inline))
#define HR_INLINE_LAMBDA __attribute__((always_inline))
#define HR_CONCAT(a, b) a##b
#define HR_NAME(prefix, isa) HR_CONCAT(prefix, isa)
#define HR_TEXT(name) HR_QUOTE(name)
#define HR_QUOTE(name) #name

namespace headrace {
namespace {
#if HR_INTEGER
#include "kernels_integer.h"
#else
#include "kernels_table.h"
#endif
}  // namespace

void HR_NAME(fill_integer_matmuls_, HR_ISA)(Kernels& k);

#if HR_INTEGER
void HR_NAME(fill_integer_matmuls_, HR_ISA)(Kernels& k) { fill_integer_matmuls(k); }
#else
const Kernels* HR_NAME(kernels_, HR_ISA)() {
  static const Kernels* table = [] {
    Kernels* k = make_table(HR_TEXT(HR_ISA));
    HR_NAME(fill_integer_matmuls_, HR_ISA)(*k);
    return k;
  }();
  return table;
}
#endif
}  // namespace headrace
