// Counter-based noise: a number is a pure function of (seed, branch, position, token), whoever asks and in whatever order.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "vec4.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace headrace {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

// The low half of each lane, times b.
inline Ulong2 multiply_low(Ulong2 a, uint32_t b) {
#ifdef __SSE2__
  return (Ulong2)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xFFFFFFFFu) * b;
#endif
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of `counter` and of the one after it.
// A lane carries a 32-bit word in its low half; its high half fills with rubbish, which nothing reads.
inline std::array<Uint4, 2> philox(PhiloxCounter counter, PhiloxKey key) {
  Ulong2 c0 = {counter[0], counter[0] + uint64_t{1}}, c1 = {counter[1], counter[1]};
  Ulong2 c2 = {counter[2], counter[2]}, c3 = {counter[3], counter[3]};
  for (int round = 0; round < 10; round++) {
    const Ulong2 p0 = multiply_low(c0, 0xD2511F53u);
    const Ulong2 p1 = multiply_low(c2, 0xCD9E8D57u);
    c0 = (p1 >> 32) ^ c1 ^ key[0];
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ key[1];
    c3 = p0;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const Ulong2 first = (c0 & 0xFFFFFFFFu) | (c1 << 32), second = (c2 & 0xFFFFFFFFu) | (c3 << 32);
  return {(Uint4)Ulong2{first[0], second[0]}, (Uint4)Ulong2{first[1], second[1]}};
}

// A standard Gumbel variate from 32 random bits, by inversion.
inline double gumbel(uint32_t word) { return -std::log(-std::log((word + 0.5) * 0x1p-32)); }

// No word gives more noise: gumbel(0xFFFFFFFF) is 22.87.
constexpr float kMaxGumbel = 22.9f;

// More than all that rounding to float can take from, or add to, a score that is still in the race.
constexpr float kRounding = 1e-3f;

// At least gumbel(word), and close to it where that is large, without a logarithm. With u the uniform number, -log u >= 1 - u,
// so gumbel <= -log(1 - u) = 32 log 2 - log(~word + 0.5); and the bits of a float, read as an integer, bound its log2 from
// below by a straight line between powers of two.
inline Float4 gumbel_bound(Uint4 words) {
  const Float4 half = __builtin_convertvector((Int4)(~words >> 1), Float4) + 0.25f;  // (~word + 0.5) / 2, or a little less
  const Float4 log2 = __builtin_convertvector((Int4)half, Float4) * 0x1p-23f - 127.0f;
  return (31.0f - log2) * 0.6931472f + kRounding;
}

}  // namespace headrace
