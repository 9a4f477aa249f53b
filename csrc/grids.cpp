// The blocks are those of ggml (`block_iq2_xxs` and so on in `ggml-common.h`); what
// they mean is in headrace/quant/gguf_blocks.py.
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

// What turns codes m around kGridZero = 64 to 128 - m where a bit of the signs is set:
// it flips the lower 7 bits, and adds 1. Of 7 signs the eighth makes the number of
// minuses even.
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

// 16 columns of a row, as numbers of 8 bytes or of 4: vectors of whatever the processor
// has.
using Eights = uint64_t __attribute__((vector_size(16)));
using Quads = uint32_t __attribute__((vector_size(16)));

Quads with_signs(Eights codes, Eights flips) {
  return reinterpret_cast<Quads>((codes ^ flips) + (flips & kOnes));
}
Eights even_flips(unsigned signs) {
  return Eights{kEvenFlips[signs & 127], kEvenFlips[signs >> 7 & 127]};
}
Eights all_flips(const uint8_t* signs) { return Eights{kFlips[signs[0]], kFlips[signs[1]]}; }

// What is added to points that are moved by 1: up, or down where a bit is set.
constexpr uint64_t move(unsigned bit) { return kOnes - 2 * kOnes * bit; }
constexpr Eights kMoves[] = {Eights{move(0), move(0)}, Eights{move(1), move(0)},
                             Eights{move(0), move(1)}, Eights{move(1), move(1)}};

float half_at(const uint8_t* p) { return half_to_float(read<uint16_t>(p)); }

// Two integers of 4 bits, and one of them, in two bytes.
unsigned two_steps(unsigned nibbles) { return (nibbles | nibbles << 4) & 0x0f0f; }
unsigned same_steps(unsigned n) { return 0x0101 * n; }

// The types. Of a block: d, times a unit; the steps of the two halves of group g, each
// in a byte, where the integer is 2 * steps + 1; and the codes of 16 columns, half h of
// group g.
struct Iq2Xxs {  // d, then for 32 columns 4 numbers, signs and scale
  static constexpr int kBytes = 66, kNumPoints = 256, kPointColumns = 8;
  static float d(const uint8_t* b) { return half_at(b) * 0.125f; }
  static unsigned steps(const uint8_t* b, int g) { return same_steps(b[2 + 8 * g + 7] >> 4); }
  static Quads codes(const uint8_t* b, const uint64_t* points, int g, int h) {
    const uint8_t* q = b + 2 + 8 * g;
    return with_signs(Eights{points[q[2 * h]], points[q[2 * h + 1]]},
                      even_flips(read<uint32_t>(q + 4) >> 14 * h));
  }
};

struct Iq2Xs {  // d, numbers with signs[32], scales[16]
  static constexpr int kBytes = 74, kNumPoints = 512, kPointColumns = 8;
  static float d(const uint8_t* b) { return half_at(b) * 0.125f; }
  static unsigned steps(const uint8_t* b, int g) { return two_steps(b[66 + g]); }
  static Quads codes(const uint8_t* b, const uint64_t* points, int g, int h) {
    const uint8_t* q = b + 2 + 8 * g + 4 * h;
    const unsigned first = read<uint16_t>(q), second = read<uint16_t>(q + 2);
    return with_signs(Eights{points[first & 511], points[second & 511]},
                      Eights{kEvenFlips[first >> 9], kEvenFlips[second >> 9]});
  }
};

struct Iq2S {  // d, numbers[32], signs[32], high bits[32], scales[16]
  static constexpr int kBytes = 82, kNumPoints = 1024, kPointColumns = 8;
  static float d(const uint8_t* b) { return half_at(b) * 0.125f; }
  static unsigned steps(const uint8_t* b, int g) { return two_steps(b[74 + g]); }
  static Quads codes(const uint8_t* b, const uint64_t* points, int g, int h) {
    const uint8_t* q = b + 2 + 4 * g + 2 * h;
    const unsigned high = b[66 + g] << 8 >> 4 * h;
    return with_signs(Eights{points[q[0] | (high & 0x300)], points[q[1] | (high >> 2 & 0x300)]},
                      all_flips(q + 32));
  }
};

// Four points of 4 columns.
Eights four_points(const uint64_t* points, unsigned a, unsigned b, unsigned c, unsigned d) {
  const auto point = [&](unsigned i) { return static_cast<uint32_t>(points[i]); };
  return reinterpret_cast<Eights>(Quads{point(a), point(b), point(c), point(d)});
}

struct Iq3Xxs {  // d, numbers[64], then for 32 columns signs and scale
  static constexpr int kBytes = 98, kNumPoints = 256, kPointColumns = 4;
  static float d(const uint8_t* b) { return half_at(b) * 0.25f; }
  static unsigned steps(const uint8_t* b, int g) { return same_steps(b[66 + 4 * g + 3] >> 4); }
  static Quads codes(const uint8_t* b, const uint64_t* points, int g, int h) {
    const uint8_t* q = b + 2 + 8 * g + 4 * h;
    return with_signs(four_points(points, q[0], q[1], q[2], q[3]),
                      even_flips(read<uint32_t>(b + 66 + 4 * g) >> 14 * h));
  }
};

struct Iq3S {  // d, numbers[64], high bits[64], signs[32], scales[8]
  static constexpr int kBytes = 110, kNumPoints = 512, kPointColumns = 4;
  static float d(const uint8_t* b) { return half_at(b); }
  static unsigned steps(const uint8_t* b, int g) {
    return same_steps(b[106 + g / 2] >> 4 * (g % 2) & 15);
  }
  static Quads codes(const uint8_t* b, const uint64_t* points, int g, int h) {
    const uint8_t* q = b + 2 + 8 * g + 4 * h;
    const unsigned high = b[66 + g] << 8 >> 4 * h;
    const auto number = [&](int i) { return q[i] | (high >> i & 0x100); };
    return with_signs(four_points(points, number(0), number(1), number(2), number(3)),
                      all_flips(b + 74 + 4 * g + 2 * h));
  }
};

struct Iq1S {  // d, numbers[32], then for 32 columns high bits, scale and sign
  static constexpr int kBytes = 50, kNumPoints = 2048, kPointColumns = 8;
  static float d(const uint8_t* b) { return half_at(b) * 0.125f; }
  static unsigned steps(const uint8_t* b, int g) { return same_steps(b[34 + 2 * g + 1] >> 4 & 7); }
  static Quads codes(const uint8_t* b, const uint64_t* points, int g, int h) {
    const uint8_t* q = b + 2 + 4 * g + 2 * h;
    const unsigned word = read<uint16_t>(b + 34 + 2 * g), high = word << 8 >> 6 * h;
    const Eights codes = {points[q[0] | (high & 0x700)], points[q[1] | (high >> 3 & 0x700)]};
    return reinterpret_cast<Quads>(codes + kMoves[3 * (word >> 15)]);
  }
};

struct Iq1M {  // numbers[32], high bits and signs[32], scales[16] and d in pieces
  static constexpr int kBytes = 56, kNumPoints = 2048, kPointColumns = 8;
  static float d(const uint8_t* b) {
    unsigned bits = 0;
    for (int i = 0; i < 4; i++) bits |= b[48 + 2 * i + 1] >> 4 << 4 * i;
    return half_to_float(static_cast<uint16_t>(bits)) * 0.125f;
  }
  static unsigned steps(const uint8_t* b, int g) {
    const unsigned both = read<uint16_t>(b + 48 + g / 2 * 2) >> 6 * (g % 2);
    return (both & 7) | (both & 56) << 5;
  }
  static Quads codes(const uint8_t* b, const uint64_t* points, int g, int h) {
    const uint8_t* q = b + 4 * g + 2 * h;
    const unsigned both = b[32 + 2 * g + h];
    const Eights codes = {points[q[0] | (both << 8 & 0x700)], points[q[1] | (both << 4 & 0x700)]};
    return reinterpret_cast<Quads>(codes + kMoves[(both >> 3 & 1) | (both >> 6 & 2)]);
  }
};

// Four lines of a unit from 16 columns of each of four rows: of each line they have 16
// bytes.
void store_lines(const Quads* rows, uint8_t* lines) {
  const Quads ab = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5),
              cd = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Quads ef = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7),
              gh = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  const Quads turned[] = {
      __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
      __builtin_shufflevector(ef, gh, 0, 1, 4, 5), __builtin_shufflevector(ef, gh, 2, 3, 6, 7)};
  for (int j = 0; j < 4; j++) std::memcpy(lines + 64 * j, &turned[j], sizeof turned[j]);
}

template <class Type>
void decode(const uint8_t* blocks, const uint64_t* points, int r, uint8_t* unit) {
  for (int i = 0; i < kGridRows; i++) {
    const uint8_t* b = blocks + i * Type::kBytes;
    const float d = Type::d(b);
    std::memcpy(unit + 4 * (r + i), &d, sizeof d);
    for (int g = 0; g < kUnit.groups(); g++) {
      const auto integers = static_cast<uint16_t>(2 * Type::steps(b, g) + 0x0101);
      std::memcpy(unit + 64 + 32 * g + 2 * (r + i), &integers, sizeof integers);
    }
  }
  uint8_t* lines = unit + kUnit.codes_offset() + 4 * r;
  for (int g = 0; g < kUnit.groups(); g++) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++, lines += 256) {
      Quads rows[kGridRows];
#pragma GCC unroll 4
      for (int i = 0; i < kGridRows; i++)
        rows[i] = Type::codes(blocks + i * Type::kBytes, points, g, h);
      store_lines(rows, lines);
    }
  }
}

template <class Type>
constexpr Grid kGrid = {Type::kBytes, Type::kNumPoints, Type::kPointColumns, decode<Type>};

constexpr std::pair<const char*, const Grid*> kGrids[] = {
    {"IQ1_S", &kGrid<Iq1S>},   {"IQ1_M", &kGrid<Iq1M>}, {"IQ2_XXS", &kGrid<Iq2Xxs>},
    {"IQ2_XS", &kGrid<Iq2Xs>}, {"IQ2_S", &kGrid<Iq2S>}, {"IQ3_XXS", &kGrid<Iq3Xxs>},
    {"IQ3_S", &kGrid<Iq3S>},
};

}  // namespace

const Grid* find_grid(const std::string& name) {
  for (const auto& [known, grid] : kGrids)
    if (name == known) return grid;
  return nullptr;
}

std::vector<uint64_t> points_of(const Grid& grid, std::span<const int8_t> integers) {
  const auto columns = static_cast<size_t>(grid.point_columns);
  if (integers.size() != grid.num_points * columns)
    throw std::invalid_argument("a weight of this format comes with the points of its grid");
  std::vector<uint64_t> points(static_cast<size_t>(grid.num_points));
  for (size_t i = 0; i < integers.size(); i++) {
    if (integers[i] < -62 || integers[i] > 62)
      throw std::invalid_argument("the integers of a grid are 62 at most");
    points[i / columns] |= static_cast<uint64_t>(kGridZero + integers[i]) << 8 * (i % columns);
  }
  return points;
}

void unpack_grid_row(const Weight& w, int row, float* out) {
  alignas(64) uint8_t unit[kUnit.bytes()];
  const int r = row % kTileRows, first = r - r % kGridRows, bytes = w.shape.grid->block_bytes;
  const uint8_t* blocks = w.tile(row / kTileRows) + first * bytes;
  for (int k = 0; k < w.cols; k++) {
    const int i = k % kUnit.columns();
    if (i == 0)
      w.shape.grid->decode(blocks + static_cast<size_t>(k / kUnit.columns()) * kTileRows * bytes,
                           w.shape.points, first, unit);
    const float scale = read<float>(unit + 4 * r) *
                        static_cast<float>(unit[64 + 32 * (i / 32) + 2 * r + i / 16 % 2]);
    out[k] = scale * static_cast<float>(unit[kUnit.codes_offset() + i / 4 * 64 + 4 * r + i % 4] -
                                        kGridZero);
  }
}

}  // namespace headrace
