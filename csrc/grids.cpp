// The blocks are those of ggml (`block_iq2_xxs` and so on in `ggml-common.h`); what they mean is in headrace/quant/gguf_blocks.py.
#include "grids.h"

#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace headrace {
namespace {

constexpr Unit kUnit = unit_of(Format::kGrid);
constexpr uint64_t kOnes = 0x0101010101010101u;

template <class T>
T read(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// What turns codes m around kGridZero = 64 to 128 - m where a bit of the signs is set: it flips the lower 7 bits, and adds 1. Of 7 signs
// the eighth makes the number of minuses even.
constexpr uint64_t flips(unsigned signs) {
  uint64_t result = 0;
  for (int i = 0; i < 8; i++)
    if (signs >> i & 1) result |= uint64_t{0x7f} << 8 * i;
  return result;
}
constexpr auto kFlips = [] {
  std::array<uint64_t, 256> table{};
  for (unsigned i = 0; i < 256; i++) table[i] = flips(i);
  return table;
}();
constexpr auto kEvenFlips = [] {
  std::array<uint64_t, 128> table{};
  for (unsigned i = 0; i < 128; i++) table[i] = flips(i | (std::popcount(i) & 1u) << 7);
  return table;
}();

uint64_t with_signs(uint64_t codes, uint64_t flips) { return (codes ^ flips) + (flips & kOnes); }

// A row of a unit, which its block goes to.
struct Row {
  uint8_t *integers, *lines;
  float* scale;

  Row(uint8_t* unit, int r)
      : integers(unit + 64 + 2 * r), lines(unit + kUnit.codes_offset() + 4 * r), scale(reinterpret_cast<float*>(unit) + r) {}
  // The integers of group g are 2 * steps + 1, of its halves or of both.
  void steps(int g, unsigned first, unsigned second) const {
    const auto both = static_cast<uint16_t>(2 * (first | second << 8) + 0x0101);
    std::memcpy(integers + 32 * g, &both, 2);
  }
  void steps(int g, unsigned n) const { steps(g, n, n); }
  // Codes of columns 8 i ...
  void codes(int i, uint64_t eight) const {
    const auto low = static_cast<uint32_t>(eight), high = static_cast<uint32_t>(eight >> 32);
    std::memcpy(lines + 128 * i, &low, 4);
    std::memcpy(lines + 128 * i + 64, &high, 4);
  }
};

float half_at(const uint8_t* p) { return half_to_float(read<uint16_t>(p)); }

void iq2_xxs(const uint8_t* b, const uint64_t* points, const Row& row) {  // d, then for 32 columns 4 numbers, signs and scale
  *row.scale = half_at(b) * 0.125f;
  for (int g = 0; g < 8; g++) {
    const uint8_t* q = b + 2 + 8 * g;
    const auto word = read<uint32_t>(q + 4);
    row.steps(g, word >> 28);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) row.codes(4 * g + i, with_signs(points[q[i]], kEvenFlips[word >> 7 * i & 127]));
  }
}

void iq2_xs(const uint8_t* b, const uint64_t* points, const Row& row) {  // d, numbers with signs[32], scales[16]
  *row.scale = half_at(b) * 0.125f;
  for (int g = 0; g < 8; g++) {
    row.steps(g, b[66 + g] & 15, b[66 + g] >> 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const unsigned word = read<uint16_t>(b + 2 + 8 * g + 2 * i);
      row.codes(4 * g + i, with_signs(points[word & 511], kEvenFlips[word >> 9]));
    }
  }
}

void iq2_s(const uint8_t* b, const uint64_t* points, const Row& row) {  // d, numbers[32], signs[32], high bits[32], scales[16]
  *row.scale = half_at(b) * 0.125f;
  for (int g = 0; g < 8; g++) {
    const uint8_t *q = b + 2 + 4 * g, *signs = b + 34 + 4 * g;
    const unsigned high = b[66 + g] << 8;
    row.steps(g, b[74 + g] & 15, b[74 + g] >> 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) row.codes(4 * g + i, with_signs(points[q[i] | (high >> 2 * i & 0x300)], kFlips[signs[i]]));
  }
}

void iq3_xxs(const uint8_t* b, const uint64_t* points, const Row& row) {  // d, numbers[64], then for 32 columns signs and scale
  *row.scale = half_at(b) * 0.25f;
  for (int g = 0; g < 8; g++) {
    const uint8_t* q = b + 2 + 8 * g;
    const auto word = read<uint32_t>(b + 66 + 4 * g);
    row.steps(g, word >> 28);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      row.codes(4 * g + i, with_signs(points[q[2 * i]] | points[q[2 * i + 1]] << 32, kEvenFlips[word >> 7 * i & 127]));
  }
}

void iq3_s(const uint8_t* b, const uint64_t* points, const Row& row) {  // d, numbers[64], high bits[64], signs[32], scales[8]
  *row.scale = half_at(b);
  for (int g = 0; g < 8; g++) {
    const uint8_t *q = b + 2 + 8 * g, *signs = b + 74 + 4 * g;
    const unsigned high = b[66 + g] << 8;
    row.steps(g, b[106 + g / 2] >> 4 * (g % 2) & 15);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const uint64_t first = points[q[2 * i] | (high >> 2 * i & 0x100)], second = points[q[2 * i + 1] | (high >> (2 * i + 1) & 0x100)];
      row.codes(4 * g + i, with_signs(first | second << 32, kFlips[signs[i]]));
    }
  }
}

// Points that are moved by 1: up, or with a sign down.
uint64_t moved(uint64_t codes, unsigned sign) { return codes + kOnes - 2 * kOnes * sign; }

void iq1_s(const uint8_t* b, const uint64_t* points, const Row& row) {  // d, numbers[32], then for 32 columns high bits, scale and sign
  *row.scale = half_at(b) * 0.125f;
  for (int g = 0; g < 8; g++) {
    const uint8_t* q = b + 2 + 4 * g;
    const unsigned word = read<uint16_t>(b + 34 + 2 * g), high = word << 8;
    row.steps(g, word >> 12 & 7);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) row.codes(4 * g + i, moved(points[q[i] | (high >> 3 * i & 0x700)], word >> 15));
  }
}

void iq1_m(const uint8_t* b, const uint64_t* points, const Row& row) {  // numbers[32], high bits and signs[32], scales[16] and d in pieces
  unsigned d = 0;
  for (int g = 0; g < 8; g++) {
    const uint8_t *q = b + 4 * g, *high = b + 32 + 2 * g;
    const unsigned word = read<uint16_t>(b + 48 + g / 2 * 2), scales = word >> 6 * (g % 2);
    d |= word >> 12 << 4 * (g / 2);
    row.steps(g, scales & 7, scales >> 3 & 7);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const unsigned four = high[i / 2] >> 4 * (i % 2);
      row.codes(4 * g + i, moved(points[q[i] | (four << 8 & 0x700)], four >> 3 & 1));
    }
  }
  *row.scale = half_to_float(static_cast<uint16_t>(d)) * 0.125f;
}

template <void (*kDecode)(const uint8_t*, const uint64_t*, const Row&)>
void decode(const uint8_t* block, const uint64_t* points, int r, uint8_t* unit) {
  kDecode(block, points, Row(unit, r));
}

constexpr std::pair<const char*, Grid> kGrids[] = {
    {"IQ1_S", {50, 2048, 8, decode<iq1_s>}},  {"IQ1_M", {56, 2048, 8, decode<iq1_m>}}, {"IQ2_XXS", {66, 256, 8, decode<iq2_xxs>}},
    {"IQ2_XS", {74, 512, 8, decode<iq2_xs>}}, {"IQ2_S", {82, 1024, 8, decode<iq2_s>}}, {"IQ3_XXS", {98, 256, 4, decode<iq3_xxs>}},
    {"IQ3_S", {110, 512, 4, decode<iq3_s>}},
};

}  // namespace

const Grid* find_grid(const std::string& name) {
  for (const auto& [known, grid] : kGrids)
    if (name == known) return &grid;
  return nullptr;
}

std::vector<uint64_t> points_of(const Grid& grid, std::span<const int8_t> integers) {
  const auto columns = static_cast<size_t>(grid.point_columns);
  if (integers.size() != grid.num_points * columns)
    throw std::invalid_argument("a weight of this format comes with the points of its grid");
  std::vector<uint64_t> points(static_cast<size_t>(grid.num_points));
  for (size_t i = 0; i < integers.size(); i++) {
    if (integers[i] < -62 || integers[i] > 62) throw std::invalid_argument("the integers of a grid are 62 at most");
    points[i / columns] |= static_cast<uint64_t>(kGridZero + integers[i]) << 8 * (i % columns);
  }
  return points;
}

void unpack_grid_row(const Weight& w, int row, float* out) {
  alignas(64) uint8_t unit[kUnit.bytes()];
  const int r = row % kTileRows, bytes = w.shape.grid->block_bytes;
  const uint8_t* block = w.tile(row / kTileRows) + r * bytes;
  for (int k = 0; k < w.cols; k++) {
    const int i = k % kUnit.columns();
    if (i == 0) w.shape.grid->decode(block + static_cast<size_t>(k / kUnit.columns()) * kTileRows * bytes, w.shape.points, r, unit);
    const float scale = read<float>(unit + 4 * r) * static_cast<float>(unit[64 + 32 * (i / 32) + 2 * r + i / 16 % 2]);
    out[k] = scale * static_cast<float>(unit[kUnit.codes_offset() + i / 4 * 64 + 4 * r + i % 4] - kGridZero);
  }
}

}  // namespace headrace
