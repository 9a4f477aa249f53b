#include "weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "codes.h"
#include "grids.h"
#include "half.h"
#include "weights_table.h"

namespace headrace {
namespace {

// Codes and scales of 32 columns of one row, in the terms of the packed unit that they
// go to.
struct Group {
  uint8_t codes[32];
  // Instead of codes: 16 bytes with codes i and i + 16, which are the bytes of the lines.
  const uint8_t* nibbles;
  uint16_t scale, min;  // f16, plain formats
  int8_t scales[2];     // integers of super formats: one per 32 columns or one per 16
  uint8_t mins[2];
  uint16_t d, dmin;  // f16, super formats
  uint8_t power;     // exponent of a float32, powers of two
};

uint16_t read16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

void nibbles(const uint8_t* q, uint8_t* codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = q[i] & 15;
    codes[i + 16] = q[i] >> 4;
  }
}

void add_fifth_bits(const uint8_t* high, uint8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, high, 4);
  for (int i = 0; i < 32; i++) codes[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
}

// 6-bit scale and minimum number j of a Q4_K or Q5_K block.
void scale_min_k4(const uint8_t* s, int j, int8_t* scale, uint8_t* min) {
  if (j < 4) {
    *scale = static_cast<int8_t>(s[j] & 63);
    *min = s[j + 4] & 63;
  } else {
    *scale = static_cast<int8_t>((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    *min = static_cast<uint8_t>((s[j + 4] >> 4) | (s[j] >> 6) << 4);
  }
}

// Each reader takes the block that holds group g (counted inside the block) and fills
// what its packed format needs.
void read_q4_0(const uint8_t* b, int, Group& r) {
  r.scale = read16(b);
  r.nibbles = b + 2;
}

void read_q4_1(const uint8_t* b, int, Group& r) {
  r.scale = read16(b);
  r.min = read16(b + 2);
  r.nibbles = b + 4;
}

void read_q5_0(const uint8_t* b, int, Group& r) {
  r.scale = read16(b);
  nibbles(b + 6, r.codes);
  add_fifth_bits(b + 2, r.codes);
}

void read_q5_1(const uint8_t* b, int, Group& r) {
  r.scale = read16(b);
  r.min = read16(b + 2);
  nibbles(b + 8, r.codes);
  add_fifth_bits(b + 4, r.codes);
}

void read_q8_0(const uint8_t* b, int, Group& r) {
  r.scale = read16(b);
  for (int i = 0; i < 32; i++) r.codes[i] = b[2 + i] ^ 0x80;
}

void read_q2_k(const uint8_t* b, int g, Group& r) {  // scales[16], codes[64], d, dmin
  const uint8_t* q = b + 16 + 32 * (g / 4);
  for (int i = 0; i < 32; i++) r.codes[i] = q[i] >> 2 * (g % 4) & 3;
  for (int h = 0; h < 2; h++) {
    r.scales[h] = static_cast<int8_t>(b[2 * g + h] & 15);
    r.mins[h] = b[2 * g + h] >> 4;
  }
  r.d = read16(b + 80);
  r.dmin = read16(b + 82);
}

void read_q3_k(const uint8_t* b, int g, Group& r) {  // high bits[32], low bits[64], scales[12], d
  const uint8_t* q = b + 32 + 32 * (g / 4);
  for (int i = 0; i < 32; i++)
    r.codes[i] = static_cast<uint8_t>((q[i] >> 2 * (g % 4) & 3) | (b[i] >> g & 1) << 2);
  const uint8_t* s = b + 96;
  for (int h = 0; h < 2; h++) {
    const int j = 2 * g + h, low = j < 8 ? s[j] & 15 : s[j - 8] >> 4,
              high = s[8 + j % 4] >> 2 * (j / 4) & 3;
    r.scales[h] = static_cast<int8_t>((low | high << 4) - 32);
  }
  r.d = read16(b + 108);
}

void read_q4_k(const uint8_t* b, int g, Group& r) {  // d, dmin, scales[12], codes[128]
  r.d = read16(b);
  r.dmin = read16(b + 2);
  scale_min_k4(b + 4, g, &r.scales[0], &r.mins[0]);
  const uint8_t* q = b + 16 + 32 * (g / 2);
  const int shift = 4 * (g % 2);
  for (int i = 0; i < 16; i++)
    r.codes[i] = static_cast<uint8_t>((q[i] >> shift & 15) | (q[i + 16] >> shift & 15) << 4);
  r.nibbles = r.codes;
}

void read_q5_k(const uint8_t* b, int g,
               Group& r) {  // d, dmin, scales[12], high bits[32], codes[128]
  r.d = read16(b);
  r.dmin = read16(b + 2);
  scale_min_k4(b + 4, g, &r.scales[0], &r.mins[0]);
  const uint8_t *high = b + 16, *q = b + 48 + 32 * (g / 2);
  for (int i = 0; i < 32; i++)
    r.codes[i] = static_cast<uint8_t>((q[i] >> 4 * (g % 2) & 15) | (high[i] >> g & 1) << 4);
}

void read_q6_k(const uint8_t* b, int g, Group& r) {  // low bits[128], high bits[64], scales[16], d
  const uint8_t *low = b + 64 * (g / 4) + 32 * (g % 2), *high = b + 128 + 32 * (g / 4);
  const int shift = 4 * (g % 4 / 2);
  for (int i = 0; i < 32; i++)
    r.codes[i] = static_cast<uint8_t>((low[i] >> shift & 15) | (high[i] >> 2 * (g % 4) & 3) << 4);
  for (int h = 0; h < 2; h++) r.scales[h] = static_cast<int8_t>(b[192 + 2 * g + h]);
  r.d = read16(b + 208);
}

// The exponent of values that are doubled. Those below 2^-126 are 0: no product with
// them would be a normal number.
uint8_t half_power(uint8_t e) { return e ? static_cast<uint8_t>(e - 1) : 0; }

void read_mxfp4(const uint8_t* b, int, Group& r) {
  r.power = half_power(b[0]);
  r.nibbles = b + 1;
}

void read_mxfp4_pairs(const uint8_t* b, int, Group& r) {  // the scale lies apart
  for (int i = 0; i < 16; i++) {
    r.codes[2 * i] = b[i] & 15;
    r.codes[2 * i + 1] = b[i] >> 4;
  }
}

void read_iq4_xs(const uint8_t* b, int g,
                 Group& r) {  // d, high bits of scales[8], low bits[8], codes[128]
  r.d = read16(b);
  r.scales[0] = static_cast<int8_t>(
      ((b[4 + g / 2] >> 4 * (g % 2) & 15) | (read16(b + 2) >> 2 * g & 3) << 4) - 32);
  r.nibbles = b + 8 + 16 * g;
}

int units_of(Format f, int cols) { return (cols + unit_columns(f) - 1) / unit_columns(f); }

// Row r (of 16) of group g of a quantised unit.
template <Format kFormat>
void place(uint8_t* unit, int g, int r, const Group& group) {
  constexpr Unit kShape = unit_of(kFormat);
  if constexpr (is_super(kShape.scales)) {
    std::memcpy(unit + 2 * r, &group.d, 2);
    if (has_min(kShape.scales)) std::memcpy(unit + 32 + 2 * r, &group.dmin, 2);
    constexpr int n = is_sub16(kShape.scales) ? 2 : 1;
    for (int h = 0; h < n; h++) {
      const int shared = kShape.scales == Scales::kSuper16Min ? group.mins[h] << 4 : 0;
      unit[64 + n * (16 * g + r) + h] = static_cast<uint8_t>(group.scales[h] | shared);
    }
    if (kShape.scales == Scales::kSuper32Min)
      unit[kShape.min_offset() + 16 * g + r] = group.mins[0];
  } else if constexpr (kShape.scales == Scales::kPower32) {
    unit[16 * g + r] = group.power;
  } else {
    std::memcpy(unit + 32 * g + 2 * r, &group.scale, 2);
    if (has_min(kShape.scales))
      std::memcpy(unit + kShape.min_offset() + 32 * g + 2 * r, &group.min, 2);
  }
  uint8_t* lines = unit + kShape.codes_offset() + g * kShape.lines_per_group() * 64 + 4 * r;
  if (kShape.bits == 4 && group.nibbles)
    for (int j = 0; j < 4; j++) std::memcpy(lines + 64 * j, group.nibbles + 4 * j, 4);
  else
    place_codes<kShape.bits>(group.codes, lines);
}

// Row r of a tile. One function for each format of a file, so that what to do with a
// group is known when it is compiled.
template <Format kFormat, int kBlockColumns, int kBlockBytes,
          void (*kRead)(const uint8_t*, int, Group&)>
void pack_grouped_row(const uint8_t* row, const uint8_t* block_scales, int cols, uint8_t* tile,
                      int r) {
  constexpr Unit kShape = unit_of(kFormat);
  constexpr int kBlockGroups = kBlockColumns / kGroup;
  Group group{};
  for (int i = 0; i < cols / kGroup; i++) {
    kRead(row + static_cast<size_t>(i / kBlockGroups) * kBlockBytes, i % kBlockGroups, group);
    if (block_scales) group.power = half_power(block_scales[i]);
    place<kFormat>(tile + static_cast<size_t>(i / kShape.groups()) * kShape.bytes(),
                   i % kShape.groups(), r, group);
  }
}

// bf16: [columns / 2][16][2]; f16 and f32: [columns][16].
void pack_float_row(Format f, const uint8_t* row, int cols, uint8_t* tile, int r) {
  const size_t size = f == Format::kF32 ? 4 : 2;
  for (int k = 0; k < cols; k++) {
    const size_t at = f == Format::kBf16 ? static_cast<size_t>(k / 2 * 16 + r) * 2 + k % 2
                                         : static_cast<size_t>(k) * 16 + r;
    std::memcpy(tile + at * size, row + k * size, size);
  }
}

// int8: [columns / 4][16][4] codes of which 128 is zero, and the row's scale behind the
// last.
void pack_i8_row(const uint8_t* row, int cols, float scale, uint8_t* tile, int units, int r) {
  for (int k = 0; k < cols; k++) tile[k / 4 * 64 + 4 * r + k % 4] = row[k] ^ 0x80;
  std::memcpy(tile + static_cast<size_t>(units) * unit_bytes(Format::kI8Row) + 4 * r, &scale, 4);
}

// What a file calls a format, the bytes of its blocks, and the way from there to the
// packed one.
struct Source {
  const char* name;
  Format format;
  int block_columns, block_bytes;
  void (*pack_row)(const uint8_t* row, const uint8_t* block_scales, int cols, uint8_t* tile,
                   int r) = nullptr;  // of grouped formats
  bool has_block_scales = false;
  size_t num_values = 0;  // that come with the matrix, beside those of grids
};

template <Format kFormat, int kBlockColumns, int kBlockBytes,
          void (*kRead)(const uint8_t* block, int group, Group& out)>
constexpr Source grouped(const char* name, bool has_block_scales = false, size_t num_values = 0) {
  constexpr auto pack_row = pack_grouped_row<kFormat, kBlockColumns, kBlockBytes, kRead>;
  return {name, kFormat, kBlockColumns, kBlockBytes, pack_row, has_block_scales, num_values};
}

constexpr Source kSources[] = {
    grouped<Format::kQ4, 32, 18, read_q4_0>("Q4_0"),
    grouped<Format::kQ4Min, 32, 20, read_q4_1>("Q4_1"),
    grouped<Format::kQ5, 32, 22, read_q5_0>("Q5_0"),
    grouped<Format::kQ5Min, 32, 24, read_q5_1>("Q5_1"),
    grouped<Format::kQ8, 32, 34, read_q8_0>("Q8_0"),
    grouped<Format::kQ2SubMin, 256, 84, read_q2_k>("Q2_K"),
    grouped<Format::kQ3Sub, 256, 110, read_q3_k>("Q3_K"),
    grouped<Format::kQ4Super, 256, 144, read_q4_k>("Q4_K"),
    grouped<Format::kQ5Super, 256, 176, read_q5_k>("Q5_K"),
    grouped<Format::kQ6Sub, 256, 210, read_q6_k>("Q6_K"),
    grouped<Format::kFloat4, 32, 17, read_mxfp4>("MXFP4"),
    grouped<Format::kFloat4, 32, 16, read_mxfp4_pairs>("MXFP4_PAIRS", true),
    grouped<Format::kLookup4Super, 256, 136, read_iq4_xs>("IQ4_XS", false, 16),
    {"BF16", Format::kBf16, 1, 2},
    {"F16", Format::kF16, 1, 2},
    {"F32", Format::kF32, 1, 4},
    {"I8_ROW", Format::kI8Row, 1, 1},
    {"I8_MIXED", Format::kI8Mixed, 1, 1},
};

Source source_of(const std::string& name) {
  for (const Source& s : kSources)
    if (name == s.name) return s;
  if (const Grid* grid = find_grid(name)) return {"", Format::kGrid, 256, grid->block_bytes};
  throw std::invalid_argument("no kernel reads weights stored as " + name);
}

float unpack_i8_row(const Weight& w, const uint8_t* tile, int r, int k) {
  float scale;
  std::memcpy(&scale,
              tile + static_cast<size_t>(w.shape.units) * unit_bytes(Format::kI8Row) + 4 * r, 4);
  return scale * static_cast<float>(tile[static_cast<size_t>(k / 4) * 64 + 4 * r + k % 4] - 128);
}

void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

void check_shape(int rows, int cols) {
  if (std::min(rows, cols) <= 0 || std::max(rows, cols) > 1 << 24)
    throw std::invalid_argument("a weight has 1 to 2^24 rows and columns");
}

size_t row_bytes(int cols, int block_columns, int block_bytes) {
  return static_cast<size_t>(cols) / block_columns * block_bytes;
}

TileShape shape_of(const std::string& format, int cols) {
  TileShape shape{units_of(packed_format(format), cols)};
  shape.grid = find_grid(format);
  return shape;
}

// Row r of a tile of blocks.
void copy_blocks(const uint8_t* row, const TileShape& shape, uint8_t* tile, int r) {
  const int bytes = shape.grid->block_bytes;
  for (int u = 0; u < shape.units; u++)
    std::memcpy(tile + (static_cast<size_t>(u) * kTileRows + r) * bytes,
                row + static_cast<size_t>(u) * bytes, bytes);
}

const std::array<CodePieces, 8>& quads_of(int bits) {
  switch (bits) {
    case 2:
      return kCodePieces<2>;
    case 3:
      return kCodePieces<3>;
    case 4:
      return kCodePieces<4>;
    case 5:
      return kCodePieces<5>;
    case 6:
      return kCodePieces<6>;
    default:
      return kCodePieces<8>;
  }
}

// The 32 codes of a group, of the row whose bytes in the first line these are.
void read_codes(const uint8_t* lines, int bits, uint8_t* codes) {
  const std::array<CodePieces, 8>& quads = quads_of(bits);
  for (int q = 0; q < 8; q++) {
    uint32_t columns = 0;
    for (int i = 0; i < quads[q].count; i++) {
      const CodePiece& p = quads[q].of[i];
      uint32_t line;
      std::memcpy(&line, lines + 64 * p.line, 4);
      columns |= (line >> p.at & 0x01010101u * static_cast<uint32_t>(p.mask)) << p.up;
    }
    std::memcpy(codes + 4 * q, &columns, 4);
  }
}

// A number is code * scale + min: those of the halves of group g of a unit, of row r. Adding a
// min of -0 changes no number.
struct HalfScales {
  float scale[2], min[2];
};

HalfScales half_scales(const Unit& shape, const uint8_t* unit, int g, int r) {
  const auto half = [&](size_t at) { return half_to_float(read16(unit + at + 2 * r)); };
  if (!is_super(shape.scales)) {
    const float scale = half(32 * g),
                min = has_min(shape.scales) ? half(shape.min_offset() + 32 * g) : 0.0f;
    return {{scale, scale}, {min, min}};
  }
  HalfScales s;
  for (int i = 0; i < 2; i++) {
    const uint8_t integer = unit[64 + (is_sub16(shape.scales) ? 2 * (16 * g + r) + i : 16 * g + r)];
    if (!has_min(shape.scales)) {
      s.scale[i] = half(0) * static_cast<float>(static_cast<int8_t>(integer));
      s.min[i] = -0.0f;
      continue;
    }
    const bool shared = shape.scales == Scales::kSuper16Min;
    const int scale = shared ? integer & 15 : integer,
              min = shared ? integer >> 4 : unit[shape.min_offset() + 16 * g + r];
    s.scale[i] = half(0) * static_cast<float>(scale);
    s.min[i] = -(half(32) * static_cast<float>(min));
  }
  return s;
}

// Columns k .. k + n - 1 of row r of a tile, of one group.
void unpack_group(const Weight& w, const uint8_t* tile, int r, int k, int n, float* out) {
  const Unit shape = unit_of(w.format);
  const uint8_t* unit = tile + static_cast<size_t>(k / shape.columns()) * shape.bytes();
  const int g = k % shape.columns() / kGroup;
  uint8_t codes[kGroup];
  read_codes(unit + shape.codes_offset() + g * shape.lines_per_group() * 64 + 4 * r, shape.bits,
             codes);
  if (shape.scales == Scales::kPower32) {
    const uint8_t power = unit[16 * g + r];
    for (int i = 0; i < n; i++)
      out[i] =
          power ? std::ldexp(static_cast<float>(kFloat4Codes[codes[i]] - kFloat4Zero), power - 127)
                : 0.0f;
    return;
  }
  const HalfScales scales = half_scales(shape, unit, g, r);
  for (int i = 0; i < n; i++) {
    const int code = (shape.is_lookup() ? w.shape.lookup.codes[codes[i]] : codes[i]) - shape.zero();
    out[i] = scales.scale[i / 16] * static_cast<float>(code) + scales.min[i / 16];
  }
}

}  // namespace

Format packed_format(const std::string& stored) { return source_of(stored).format; }

size_t packed_bytes(const std::string& format, int rows, int cols) {
  check_shape(rows, cols);
  const Format f = packed_format(format);
  return static_cast<size_t>((rows + kTileRows - 1) / kTileRows) *
         tile_bytes(f, shape_of(format, cols));
}

size_t check_rows(const Stored& stored, int block_columns, int block_bytes) {
  check_shape(stored.rows, stored.cols);
  const auto rows = static_cast<size_t>(stored.rows);
  const size_t bytes = row_bytes(stored.cols, block_columns, block_bytes);
  require(stored.cols % block_columns == 0 && stored.bytes % bytes == 0,
          "a weight's bytes do not match its shape and format");
  const size_t there = stored.bytes / bytes;  // of which a row order may take some
  require(stored.row_order.empty() ? there == rows : stored.row_order.size() == rows,
          "a weight has other rows than those that are stored");
  for (const int64_t row : stored.row_order)
    require(row >= 0 && static_cast<size_t>(row) < there,
            "a weight's row order names a row that is not there");
  return there;
}

void check_stored(const Stored& stored) {
  const Source source = source_of(stored.format);
  const bool row_scaled = is_i8(source.format);
  const size_t there = check_rows(stored, source.block_columns, source.block_bytes);
  require(stored.row_scales.size() == (row_scaled ? there : 0),
          "a weight needs a scale for each row that is stored, or none at all in this format");
  require(stored.block_scales.size() ==
              (source.has_block_scales
                   ? there * (static_cast<size_t>(stored.cols) / source.block_columns)
                   : 0),
          "a weight needs a scale for each block that is stored, or none at all in this format");
  require(source.format == Format::kGrid || stored.values.size() == source.num_values,
          "a weight comes with the 16 values of its codes, or none at all in this format");
  require(!row_scaled || stored.cols <= kMaxRowColumns,
          "int8 with one scale a row has at most 131,072 columns: more may overflow a sum");
}

Weight empty_weight(const Stored& stored, const uint64_t* points, uint8_t* to, size_t stride) {
  const Source source = source_of(stored.format);
  TileShape shape = shape_of(stored.format, stored.cols);
  shape.points = points;
  if (source.num_values)
    for (size_t i = 0; i < std::size(shape.lookup.codes); i++)
      shape.lookup.set(i, stored.values[i]);
  return {source.format, stored.rows, stored.cols, shape, stride, to};
}

void pack_tiles(const Stored& stored, const Weight& w, int begin, int end) {
  const Source source = source_of(stored.format);
  const auto scales_of = [&](int64_t row) {
    return source.has_block_scales
               ? stored.block_scales.data() + row * (stored.cols / source.block_columns)
               : nullptr;
  };
  for (int row = begin * kTileRows; row < std::min(end * kTileRows, w.rows); row++) {
    const int64_t from = stored.row_order.empty() ? row : stored.row_order[row];
    const uint8_t* bytes =
        stored.row(row, row_bytes(stored.cols, source.block_columns, source.block_bytes));
    uint8_t* tile = w.data + static_cast<size_t>(row / kTileRows) * w.stride;
    if (source.pack_row)
      source.pack_row(bytes, scales_of(from), w.cols, tile, row % kTileRows);
    else if (w.format == Format::kGrid)
      copy_blocks(bytes, w.shape, tile, row % kTileRows);
    else if (is_i8(w.format))
      pack_i8_row(bytes, w.cols, stored.row_scales[from], tile, w.shape.units, row % kTileRows);
    else
      pack_float_row(source.format, bytes, w.cols, tile, row % kTileRows);
  }
}

void unpack_row(const Weight& w, int row, float* out) {
  if (w.format == Format::kGrid) return unpack_grid_row(w, row, out);
  const uint8_t* tile = w.tile(row / kTileRows);
  const int r = row % kTileRows;
  if (is_grouped(w.format) && !is_table(w.format)) {
    for (int k = 0; k < w.cols; k += kGroup)
      unpack_group(w, tile, r, k, std::min(kGroup, w.cols - k), out + k);
    return;
  }
  for (int k = 0; k < w.cols; k++) {
    if (is_table(w.format)) {
      out[k] = unpack_table(w, tile, r, k);
    } else if (is_i8(w.format)) {
      out[k] = unpack_i8_row(w, tile, r, k);
    } else if (w.format == Format::kBf16) {
      out[k] = bf16_to_float(read16(tile + (static_cast<size_t>(k / 2 * 16 + r) * 2 + k % 2) * 2));
    } else if (w.format == Format::kF16) {
      out[k] = half_to_float(read16(tile + (static_cast<size_t>(k) * 16 + r) * 2));
    } else {
      std::memcpy(&out[k], tile + (static_cast<size_t>(k) * 16 + r) * 4, 4);
    }
  }
}

}  // namespace headrace
