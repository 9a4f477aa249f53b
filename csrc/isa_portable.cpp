#include <cstring>

#include "codes.h"
#include "half.h"
#include "kernels.h"

#define HR_SIMD "simd_portable.h"
#define HR_INLINE inline __attribute__((always_inline))
#define HR_INLINE_LAMBDA __attribute__((always_inline))

namespace headrace {
namespace {
#include "kernels_table.h"
}  // namespace

const Kernels* kernels_portable() {
  static const Kernels* table = make_table("portable");
  return table;
}
}  // namespace headrace
