// Packed weight formats: how a matrix lies in memory once it is loaded.
//
// A matrix is cut into tiles of 16 rows, a tile along its columns into units. One
// 64-byte line of a unit holds, for each of the 16 rows, 4 adjacent bytes: the operand
// of a byte dot product whose lane is the row. So a tile is one linear stream, no sum
// ever crosses lanes, and AVX2 or portable code reads the same bytes in two halves or
// one by one.
//
// Quantised units are made of 32-column groups. Codes of n bits take n lines for a
// group, of which a byte holds 8 / n whole ones, counted from its low end: code f of
// byte b of line j is that of column 4 (n f + j) + b. What is left at the top of the
// bytes holds the columns beyond, their bits line after line: of 3 bits, those of
// columns 24 .. 27 lie in line 0 and above them in line 1. So most codes are what the
// byte dot product takes but for a shift and a mask. Of float codes (kFloat4) a nibble
// is the number of one of 16 values, kFloat4Codes. A tile of kI8Row is groups of 8 bits
// without scales, then one line with the 16 float scales of its rows.
//
// Formats with scales of groups of any size (kTable) have them in a table in front of a
// tile's codes, and behind it one of zero points or minima; what these are made of is
// known when a step runs (TileShape). Codes of kLookup4 are the numbers of 16 values
// that come with the matrix, those of kFloat8E4 and kFloat8E5 small floats.
//
// Of 2:4 weights (kSparse4, kSparse8, kSparseI8, kSparseBf16) two of every four columns of a
// row are kept. Of a group of 32 columns, line 0 has the places: bits 4j .. 4j + 2 of the
// number of a row tell which of columns 4j .. 4j + 3 (kPlaces in sparse.h). The lines after it
// have the kept values in the order of columns: 16 codes of 4 or 8 bits, as those of a group
// are, or pairs of bf16. Codes lie around 0: zeroed memory is a matrix of zeros. A kernel spreads
// them to all columns in registers.
//
// Matrices whose codes are numbers of points of a grid (kGrid) stay blocks of their
// file, of 256 columns of a row each: a tile is the 16 blocks of its rows, one after
// the other, for each super-block. A kernel decodes these 16 to a unit with codes of 8
// bits (Grid).
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int kTileRows = 16;
constexpr int kGroup = 32;

// What the scales of a unit look like. All numbers are those of the file; nothing is
// rounded on the way.
enum class Scales {
  kGroup32,     // f16 scale per 32 columns
  kGroup32Min,  // and an f16 minimum: w = scale * q + min
  kSuper32,     // per 256 columns f16 d; per 32 columns a signed integer: w = d * sc * value[code]
  kSuper32Min,  // per 256 columns f16 d, dmin; per 32 columns 6-bit integers: w = d * sc * q - dmin
                // * mn
  kSuper16,     // per 256 columns f16 d; per 16 columns a signed integer: w = d * sc * (q - zero)
  kSuper16Min,  // as kSuper32Min, with integers per 16 columns
  kDecoded16,   // as kSuper16 with a float32 d: of points of a grid, decoded
  kPower32,  // per 32 columns the exponent of a power of two, as bits of a float32, of which 0 is
             // 0: w = 2^e * value[code]
  kTable,    // of groups of any size: w = scale * (q - zero point) or scale * q + minimum
};

// The values of float codes of 4 bits, doubled (e2m1: OCP microscaling formats, 2023),
// plus kFloat4Zero so that none is negative.
constexpr int kFloat4Zero = 16;
constexpr uint8_t kFloat4Codes[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// The formats that kernels exist for; index of the kernel tables.
enum class Format : int {
  kQ4,            // Q4_0
  kQ4Min,         // Q4_1
  kQ4Super,       // Q4_K
  kQ5,            // Q5_0
  kQ5Min,         // Q5_1
  kQ5Super,       // Q5_K
  kQ8,            // Q8_0
  kQ2SubMin,      // Q2_K
  kQ3Sub,         // Q3_K
  kQ6Sub,         // Q6_K
  kFloat4,        // MXFP4
  kLookup4Super,  // IQ4_XS
  kGrid,          // IQ1, IQ2, IQ3
  kTable2,        // integers of 2, 3, 4, 8 bits
  kTable3,
  kTable4,
  kTable8,
  kLookup4,   // NF4, FP4, IQ4_NL, ...
  kFloat8E4,  // e4m3, e5m2: Micikevicius et al. 2022
  kFloat8E5,
  kSparse4,  // 2:4 integers of 4 and 8 bits
  kSparse8,
  kBf16,
  kF16,
  kF32,
  kI8Row,       // int8 with one scale a row
  kI8Mixed,     // the same, for activations whose outliers stay float32: LLM.int8
  kSparseI8,    // 2:4 int8 with one scale a row, in its table
  kSparseBf16,  // 2:4, without scales
};
constexpr int kNumFormats = 29;

constexpr bool is_i8(Format f) { return f == Format::kI8Row || f == Format::kI8Mixed; }
constexpr bool is_sparse(Format f) {
  return f == Format::kSparse4 || f == Format::kSparse8 || f == Format::kSparseI8 ||
         f == Format::kSparseBf16;
}

// How a kernel wants its activations. An activation buffer holds every form that its
// readers need. kQ8 is symmetric int8 per 32 columns. kQ8Offset puts the range of the
// codes around the middle of the group's numbers: behind a norm, where single channels
// stick out to one side, it loses less than half as much in KL, for one more
// multiply-add per group. kQ8Row is symmetric int8 with one scale for all columns of a
// row, so it can be made only of a row that is complete. In kQ8Mixed numbers beyond a
// threshold stay float32 and are 0 among the others (LLM.int8, Dettmers et al. 2022).
enum class Form : int { kQ8, kQ8Offset, kQ8Row, kQ8Mixed, kBf16, kF32 };
constexpr int kNumForms = 6;

constexpr bool is_by_row(Form f) { return f == Form::kQ8Row || f == Form::kQ8Mixed; }

// How quantised weights are multiplied: with int8 activations, with those that have an
// offset, or as float32 with float32. Weights that are floats, or int8 by row, have one
// way, which is all of these.
enum class Mode : int { kInt8, kInt8Offset, kFloat };
constexpr int kNumModes = 3;

constexpr bool is_sub16(Scales s) {
  return s == Scales::kSuper16 || s == Scales::kSuper16Min || s == Scales::kDecoded16;
}
constexpr bool is_super(Scales s) {
  return s == Scales::kSuper32 || s == Scales::kSuper32Min || is_sub16(s);
}
constexpr bool has_min(Scales s) {
  return s == Scales::kGroup32Min || s == Scales::kSuper32Min || s == Scales::kSuper16Min;
}

// Geometry of a quantised unit, in bytes, for 16 rows.
struct Unit {
  int bits;  // of a code
  Scales scales;
  int width = 0;  // of what codes are multiplied as, where it is not their own: wider of values
                  // that are looked up
  bool sparse = false;  // 2:4

  constexpr int columns() const {
    return is_super(scales)             ? 256
           : scales == Scales::kPower32 ? 128
           : scales == Scales::kTable   ? kGroup
                                        : 64;
  }
  constexpr int groups() const { return columns() / kGroup; }
  constexpr int lines_per_group() const { return sparse ? 1 + bits / 2 : bits; }
  // Offsets of the parts. Plain: f16 scale[groups][16], f16 min[groups][16]; of powers
  // u8 exponent[groups][16]. Super: f16 d[16], f16 dmin[16] or float d[16] (64 bytes
  // either way), then s8 scale[n][16] and u8 min[n][16] with n integers per unit.
  // Integers of 16 columns lie in pairs, those of a group side by side, [n / 2][16][2];
  // those of kSuper16Min have 4 bits and share a byte, the scale low.
  constexpr int num_scales() const { return is_sub16(scales) ? columns() / 16 : groups(); }
  constexpr int min_offset() const {
    return is_super(scales) ? 64 + 16 * num_scales() : 32 * groups();
  }
  constexpr int codes_offset() const {
    if (scales == Scales::kTable) return 0;
    if (is_super(scales))
      return min_offset() + (scales == Scales::kSuper32Min ? 16 * num_scales() : 0);
    return groups() * (scales == Scales::kPower32 ? 16 : has_min(scales) ? 64 : 32);
  }
  constexpr int bytes() const { return codes_offset() + groups() * lines_per_group() * 64; }
  // Width of what the codes are multiplied as.
  constexpr int code_bits() const { return width ? width : bits; }
  // Whether a code is the number of a value: of kFloat4Codes, or of those that come
  // with the matrix.
  constexpr bool is_lookup() const { return code_bits() > bits; }
  // The code that stands for zero in formats without minimum: half of the range; that
  // of float codes is kFloat4Zero.
  constexpr int zero() const {
    return has_min(scales) ? 0 : scales == Scales::kPower32 ? kFloat4Zero : 1 << (code_bits() - 1);
  }
};

// Whether the scales are those of groups, and whether they lie in a table.
constexpr bool is_grouped(Format f) { return f < Format::kBf16; }
constexpr bool is_table(Format f) {
  return (f >= Format::kTable2 && f <= Format::kFloat8E5) || is_sparse(f);
}
// Whether codes are floats, which no integer product takes.
constexpr bool is_float8(Format f) { return f == Format::kFloat8E4 || f == Format::kFloat8E5; }

constexpr Unit unit_of(Format f) {
  switch (f) {
    case Format::kQ4:
      return {4, Scales::kGroup32};
    case Format::kQ4Min:
      return {4, Scales::kGroup32Min};
    case Format::kQ4Super:
      return {4, Scales::kSuper32Min};
    case Format::kQ5:
      return {5, Scales::kGroup32};
    case Format::kQ5Min:
      return {5, Scales::kGroup32Min};
    case Format::kQ5Super:
      return {5, Scales::kSuper32Min};
    case Format::kQ2SubMin:
      return {2, Scales::kSuper16Min};
    case Format::kQ3Sub:
      return {3, Scales::kSuper16};
    case Format::kQ6Sub:
      return {6, Scales::kSuper16};
    case Format::kFloat4:
      return {4, Scales::kPower32, 5};
    case Format::kLookup4Super:
      return {4, Scales::kSuper32, 8};
    case Format::kGrid:
      return {8, Scales::kDecoded16, 7};
    case Format::kTable2:
      return {2, Scales::kTable};
    case Format::kTable3:
      return {3, Scales::kTable};
    case Format::kTable4:
      return {4, Scales::kTable};
    case Format::kLookup4:
      return {4, Scales::kTable, 8};
    case Format::kSparse4:
      return {4, Scales::kTable, 0, true};
    case Format::kSparse8:
    case Format::kSparseI8:
      return {8, Scales::kTable, 0, true};
    case Format::kSparseBf16:
      return {16, Scales::kTable, 0, true};
    case Format::kTable8:
    case Format::kFloat8E4:
    case Format::kFloat8E5:
      return {8, Scales::kTable};
    default:
      return {8, Scales::kGroup32};
  }
}

// Columns of one unit, and its bytes for 16 rows. bf16 goes in pairs of columns, f16
// and f32 column by column.
constexpr int unit_columns(Format f) {
  return is_grouped(f) || is_sparse(f) ? unit_of(f).columns()
         : is_i8(f)                    ? kGroup
         : f == Format::kBf16          ? 2
                                       : 1;
}
constexpr int unit_bytes(Format f) {
  return is_grouped(f) || is_sparse(f) ? unit_of(f).bytes()
         : is_i8(f)                    ? kGroup * kTileRows
         : f == Format::kF16           ? 32
                                       : 64;
}
// What the numbers of a table are. Zero points are kU8, minima floats; with neither,
// codes lie around the middle of their range.
enum class Number : int { kNone, kU8, kF16, kBf16, kF32 };
constexpr size_t number_bytes(Number n) {
  return n == Number::kNone ? 0 : n == Number::kU8 ? 1 : n == Number::kF32 ? 4 : 2;
}

// The values of a kLookup4 matrix: w = scale * values[code], which an integer product
// takes for scale * unit * (codes[code] - 128). Those of kLookup4Super are integers, of
// which there are the codes alone.
struct Lookup {
  uint8_t codes[16], low_nibbles[16], high_nibbles[16];  // the last two are those of the codes
  float values[16];
  float unit;

  constexpr void set(size_t i, int integer) {  // from -128 to 127
    codes[i] = static_cast<uint8_t>(integer + 128);
    low_nibbles[i] = codes[i] & 15;
    high_nibbles[i] = codes[i] >> 4;
  }
};

// The blocks of a kGrid matrix (grids.cpp). A point has 4 or 8 integers of neighbouring
// columns, up to 62 and around kGridZero in the bytes of a number.
constexpr int kGridZero = 64, kGridRows = 4;
struct Grid {
  int block_bytes;
  int num_points, point_columns;
  // Rows r to r + kGridRows - 1 of a unit of kGrid: codes around kGridZero, integers
  // and d, from their blocks.
  void (*decode)(const uint8_t* blocks, const uint64_t* points, int r, uint8_t* unit);
};

// How the tiles of a matrix lie.
struct TileShape {
  int units = 0;
  // Tables: columns that share a scale, 16 or a multiple of 32, of which the last may
  // have fewer; scales, zeros: [number][16].
  int scale_columns = 0, num_scales = 0;
  Number scales = Number::kNone, zeros = Number::kNone;
  Lookup lookup = {};
  const Grid* grid = nullptr;  // of kGrid, and its points
  const uint64_t* points = nullptr;

  constexpr size_t zeros_offset() const { return num_scales * kTileRows * number_bytes(scales); }
  constexpr size_t codes_offset() const {
    return (zeros_offset() + num_scales * kTileRows * number_bytes(zeros) + 63) / 64 * 64;
  }
};

// Bytes of a tile, in whole lines.
constexpr size_t tile_bytes(Format f, const TileShape& shape) {
  const size_t codes = static_cast<size_t>(shape.units) *
                       (shape.grid ? kTileRows * shape.grid->block_bytes : unit_bytes(f));
  const size_t bytes = shape.codes_offset() + codes + (is_i8(f) ? kTileRows * sizeof(float) : 0);
  return (bytes + 63) / 64 * 64;
}

// Columns of kI8Row that can be summed up in 32 bits: a product is at most 128 * 127.
constexpr int kMaxRowColumns = 1 << 17;

// Q8 activations: for a block of n rows and each 32-column group, n x 48 bytes: s8
// x[n][32], f32 scale[n], s32 zero_sum[n] = -8 * sum(x), s16 half_sums[n][2] = -4 * the
// sums over the first and the last 16 columns, f32 sum[n] = scale * sum(x); with offset
// 4 more: f32 offset[n], to be added to every number of the group.
constexpr int q8_group_bytes(bool offset) { return offset ? 52 : 48; }

// Q8Row activations: for a block of n rows f32 scale[n], s32 zero_sum[n] = -128 *
// sum(x), then s8 x[n][32] for each 32 columns.
constexpr size_t kRowHeaderBytes = 8;

// Q8Mixed activations: the outliers of each of the n rows, in ascending columns, then
// the rows as in Q8Row. A row with more than kMost of them has a higher threshold.
struct Outliers {
  static constexpr int kMost = 32;
  static constexpr float kThreshold = 6;
  int32_t count;
  int32_t columns[kMost];
  float values[kMost];
};

// Bytes of `columns` of one activation row, and of a whole one; columns are already
// padded to the readers' units.
constexpr size_t form_column_bytes(Form form, size_t columns) {
  if (form == Form::kQ8 || form == Form::kQ8Offset)
    return columns / kGroup * q8_group_bytes(form == Form::kQ8Offset);
  return is_by_row(form) ? columns : form == Form::kBf16 ? columns * 2 : columns * 4;
}
constexpr size_t form_row_bytes(Form form, size_t columns) {
  return form_column_bytes(form, columns) + (is_by_row(form) ? kRowHeaderBytes : 0) +
         (form == Form::kQ8Mixed ? sizeof(Outliers) : 0);
}

}  // namespace headrace
