// 2:4 sparsity: of every four columns of a row two are kept (format.h). Which two is a number.
#pragma once
#include <array>
#include <cstdint>

namespace headrace {

constexpr int kSparseColumns = 4, kSparseKept = 2;
constexpr int kNumPlaces = 6;
constexpr int kPlaces[kNumPlaces][kSparseKept] = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}};

// The number of places as a file has them, a bit for each of four columns; -1: other than two.
constexpr std::array<int8_t, 16> kPlacesOfBits = [] {
  std::array<int8_t, 16> numbers = {};
  for (int bits = 0; bits < 16; bits++) {
    numbers[bits] = -1;
    for (int i = 0; i < kNumPlaces; i++)
      if (bits == (1 << kPlaces[i][0] | 1 << kPlaces[i][1])) numbers[bits] = static_cast<int8_t>(i);
  }
  return numbers;
}();

// For each number of places four bytes of a lane, of which each is the number of a byte of that
// lane, or kNoByte. Of 8 entries kNumPlaces are used: as many as a vector of AVX2 holds.
constexpr uint8_t kNoByte = 0x80;
using LaneBytes = std::array<uint32_t, 8>;

// Kept bytes, which are bytes 2 half and 2 half + 1 of the lane, to their columns.
constexpr LaneBytes spread_bytes(int half) {
  LaneBytes of = {};
  for (int i = 0; i < kNumPlaces; i++)
    for (int column = 0; column < kSparseColumns; column++) {
      const uint32_t byte = column == kPlaces[i][0]   ? 2 * half
                            : column == kPlaces[i][1] ? 2 * half + 1
                                                      : kNoByte;
      of[i] |= byte << 8 * column;
    }
  return of;
}

// Kept numbers of 16 bits, which are the halves of the lane, to columns 2 half and 2 half + 1.
constexpr LaneBytes spread_shorts(int half) {
  LaneBytes of = {};
  for (int i = 0; i < kNumPlaces; i++)
    for (int byte = 0; byte < 4; byte++) {
      const int column = 2 * half + byte / 2;
      const uint32_t from = column == kPlaces[i][0]   ? byte % 2
                            : column == kPlaces[i][1] ? 2 + byte % 2
                                                      : kNoByte;
      of[i] |= from << 8 * byte;
    }
  return of;
}

constexpr LaneBytes kSpreadBytes[2] = {spread_bytes(0), spread_bytes(1)};
constexpr LaneBytes kSpreadShorts[2] = {spread_shorts(0), spread_shorts(1)};

}  // namespace headrace
