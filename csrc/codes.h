// Codes of a group in their lines (format.h): where the bits of each lie.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>

namespace headrace {

// Some adjacent bits of four codes: in a line from bit `at` of each byte on, in the
// codes from bit `up` on.
struct CodePiece {
  int line, at, up, mask;
};
struct CodePieces {
  CodePiece of[3];
  int count;
};

// The pieces of codes 4 quad .. 4 quad + 3 of a group, of so many bits each.
constexpr CodePieces code_pieces(int bits, int quad) {
  const int whole = 8 / bits, left = 8 - whole * bits;
  if (quad < whole * bits) return {{{quad % bits, quad / bits * bits, 0, (1 << bits) - 1}}, 1};
  CodePieces r = {};
  int from = (quad - whole * bits) * bits;  // among the bits that are left, line after line
  for (int up = 0; up < bits;) {
    const int at = from % left, count = left - at < bits - up ? left - at : bits - up;
    r.of[r.count++] = {from / left, whole * bits + at, up, (1 << count) - 1};
    from += count, up += count;
  }
  return r;
}

// Those of all quads of a group.
template <int kBits>
constexpr std::array<CodePieces, 8> kCodePieces = [] {
  std::array<CodePieces, 8> of = {};
  for (int q = 0; q < 8; q++) of[q] = code_pieces(kBits, q);
  return of;
}();

// Puts a group's codes of one row into its lines, which are 0 there.
template <int kBits>
void place_codes(const uint8_t* codes, uint8_t* lines) {
  uint32_t quads[kBits] = {};
#pragma GCC unroll 8
  for (int q = 0; q < 8; q++) {
    constexpr uint32_t kEach = 0x01010101u;
    const CodePieces& pieces = kCodePieces<kBits>[q];
    uint32_t columns;
    std::memcpy(&columns, codes + 4 * q, 4);
#pragma GCC unroll 3
    for (int i = 0; i < pieces.count; i++) {
      const CodePiece p = pieces.of[i];
      quads[p.line] |= (columns >> p.up & kEach * static_cast<uint32_t>(p.mask)) << p.at;
    }
  }
  for (int j = 0; j < kBits; j++) std::memcpy(lines + 64 * j, &quads[j], 4);
}

// Code i of a group, of the row whose bytes in the first line these are.
inline int code_at(const uint8_t* lines, int bits, int i) {
  const CodePieces pieces = code_pieces(bits, i / 4);
  int code = 0;
  for (int k = 0; k < pieces.count; k++) {
    const CodePiece p = pieces.of[k];
    code |= (lines[64 * p.line + i % 4] >> p.at & p.mask) << p.up;
  }
  return code;
}

}  // namespace headrace
