// The integer matrix kernels: a unit of their own, as they take half of the time to compile.
// clang-format off: each of these needs those before it.
#include "simd_unroll.h"
#include HR_SIMD
#include "kernels_sparse.h"
#include "kernels_matmul.h"
#include "kernels_matmul_table.h"
#include "kernels_matmul_wide.h"
#include "kernels_matmuls.h"
// clang-format on
