#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstring>

#include "codes.h"
#include "kernels.h"

#define HR_SIMD "simd_neon.h"
#define HR_INLINE inline __attribute__((always_inline))
#define HR_INLINE_LAMBDA __attribute__((always_inline))

namespace headrace {
namespace {
#include "kernels_table.h"
}  // namespace

const Kernels* kernels_neon() {
  static const Kernels* table = make_table("neon");
  return table;
}
}  // namespace headrace
#endif
