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

inline float bf16_to_float(uint16_t b) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(b) << 16);
}

}  // namespace headrace
