// Half-precision numbers for baseline code.
#pragma once
#include <cstdint>

namespace headrace {

// IEEE 754 binary16 to float32, exactly.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31,
                 fraction = h & 1023;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
    const float x = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -x : x;
  }
  const uint32_t e = exponent == 31 ? 255 : exponent + 112;
  return __builtin_bit_cast(float, sign | e << 23 | fraction << 13);
}

// The nearest binary16, ties to even; infinity from 65520 on.
inline uint16_t float_to_half(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = bits >> 16 & 0x8000,
                 size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (size < 0x38800000) {  // subnormal: 0.5 and it are a multiple of 2^-24
    const float sum = __builtin_bit_cast(float, size) + 0.5f;
    return static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, sum) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

inline float bf16_to_float(uint16_t b) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(b) << 16);
}

}  // namespace headrace
