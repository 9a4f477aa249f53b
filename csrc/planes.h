// The bits of codes in planes (format.h).
#pragma once
#include <cstdint>
#include <cstring>

namespace headrace {

// Of each of a group's codes, kBits from bit `shift` on: the plane that begins at `lines`, for one row.
template <int kBits>
void place_plane(const uint8_t* codes, int shift, uint8_t* lines) {
  constexpr uint32_t kMask = 0x01010101u * ((1u << kBits) - 1);
  for (int j = 0; j < kBits; j++) {
    uint32_t quad = 0;
    for (int f = 0; f < 8 / kBits; f++) {
      uint32_t columns;
      std::memcpy(&columns, codes + 4 * (kBits * f + j), 4);
      quad |= (columns >> shift & kMask) << kBits * f;
    }
    std::memcpy(lines + 64 * j, &quad, 4);
  }
}

// The bits of column i in a plane.
inline int plane_bits(const uint8_t* lines, int bits, int i) {
  const int quad = i / 4;
  return lines[64 * (quad % bits) + i % 4] >> bits * (quad / bits) & ((1 << bits) - 1);
}

}  // namespace headrace
