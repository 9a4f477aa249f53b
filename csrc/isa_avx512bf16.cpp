#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "codes.h"
#include "kernels.h"

#define HR_SIMD "simd_avx512.h"
#define HR_INLINE inline __attribute__((always_inline))
#define HR_INLINE_LAMBDA __attribute__((always_inline))

namespace headrace {
namespace {
#include "kernels_table.h"
}  // namespace

const Kernels* kernels_avx512bf16() {
  static const Kernels* table = make_table("avx512bf16");
  return table;
}
}  // namespace headrace
#endif
