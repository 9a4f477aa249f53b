// Vectors of 16 bytes, which every 64-bit processor has, as GCC and Clang spell them for all of them.
#pragma once

#include <cstdint>

namespace headrace {

using Float4 = float __attribute__((vector_size(16)));
using Int4 = int32_t __attribute__((vector_size(16)));
using Uint4 = uint32_t __attribute__((vector_size(16)));
using Ulong2 = uint64_t __attribute__((vector_size(16)));

inline Float4 splat(float x) { return Float4{x, x, x, x}; }

inline bool any(Int4 mask) {
  const Ulong2 halves = (Ulong2)mask;
  return (halves[0] | halves[1]) != 0;
}

// exp(x) for x <= 0 within 2e-7 of its size; 0 below -87. Cephes' expf.
inline Float4 exp_negative(Float4 x) {
  const Float4 clamped = x > -87.0f ? x : splat(-87.0f);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Float4 n = (clamped * 1.44269504f + kRound) - kRound;
  const Float4 r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Float4 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Int4 power = (__builtin_convertvector(n, Int4) + 127) << 23;
  return x > -87.0f ? p * (Float4)power : Float4{};
}

}  // namespace headrace
