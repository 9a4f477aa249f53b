// The kernels over copies of matrices (copy_shape.h), of one instruction set: compiled as isa.cpp
// is.
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstring>

#include "codes.h"
#include "copy_shape.h"
#include "half.h"
#include "kernels.h"
#include "sparse.h"

#define HR_INLINE inline __attribute__((always_inline))
#define HR_INLINE_LAMBDA __attribute__((always_inline))
#define HR_CONCAT(a, b) a##b
#define HR_NAME(prefix, isa) HR_CONCAT(prefix, isa)

namespace headrace {
namespace {
// clang-format off: each of these needs those before it.
#include "simd_unroll.h"
#include HR_SIMD
#include "kernels_sparse.h"
#include "simd_copies.h"
#include "kernels_matmul.h"
#include "kernels_matmul_table.h"
#include "kernels_copies.h"
// clang-format on
}  // namespace

const CopyKernels* HR_NAME(copy_kernels_, HR_ISA)() {
  static const CopyKernels table = [] {
    CopyKernels k = {};
    fill_copies(k);
    return k;
  }();
  return &table;
}
}  // namespace headrace
