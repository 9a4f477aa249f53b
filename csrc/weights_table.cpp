#include "weights_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "codes.h"
#include "half.h"

namespace headrace {
namespace {

int units_of(int cols) { return (cols + kGroup - 1) / kGroup; }

float number(const uint8_t* p, Number type) {
  if (type == Number::kU8) return *p;
  uint16_t half = 0;
  float whole = 0;
  std::memcpy(&half, p, type == Number::kF32 ? 0 : 2);
  std::memcpy(&whole, p, type == Number::kF32 ? 4 : 0);
  return type == Number::kF16    ? half_to_float(half)
         : type == Number::kBf16 ? bf16_to_float(half)
                                 : whole;
}

// A float of 8 bits with so many for the fraction; all codes are finite here.
float small_float(uint8_t code, int fraction_bits) {
  const int fraction = code & ((1 << fraction_bits) - 1), exponent = (code & 127) >> fraction_bits,
            bias = (1 << (6 - fraction_bits)) - 1;
  const int whole = exponent ? fraction + (1 << fraction_bits) : fraction;
  const float magnitude =
      std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - bias - fraction_bits);
  return code & 128 ? -magnitude : magnitude;
}

// The integers that come nearest to the values, with the unit for which they do.
Lookup lookup_of(const std::array<float, 16>& values) {
  Lookup best{};
  float top = 0;
  for (const float v : values) top = std::max(top, std::fabs(v));
  double least = -1;
  for (int step = 0; step <= 256 && top > 0; step++) {
    const float unit = top / (127 - 0.25f * static_cast<float>(step));
    double error = 0;
    for (const float v : values) error += std::pow(v - unit * std::round(v / unit), 2);
    if (least >= 0 && error >= least) continue;
    least = error, best.unit = unit;
  }
  for (size_t i = 0; i < values.size(); i++) {
    best.values[i] = values[i];
    best.set(i, best.unit > 0 ? static_cast<int>(std::lround(values[i] / best.unit)) : 0);
  }
  return best;
}

// The scales of a row of a matrix, or its zeros, to their places in a tile.
void place_numbers(const uint8_t* from, size_t size, int count, int r, uint8_t* table) {
  for (int i = 0; i < count; i++)
    std::memcpy(table + (static_cast<size_t>(i) * kTileRows + r) * size, from + i * size, size);
}

void place_group(Format format, const uint8_t* codes, uint8_t* lines) {
  if (format == Format::kTable2) return place_codes<2>(codes, lines);
  if (format == Format::kTable3) return place_codes<3>(codes, lines);
  if (format == Format::kTable4 || format == Format::kLookup4) return place_codes<4>(codes, lines);
  place_codes<8>(codes, lines);
}

// A row of a matrix: codes, scales, and zeros or null.
void place_row(const Weight& w, int row, const uint8_t* codes, const uint8_t* scales,
               const uint8_t* zeros) {
  const int r = row % kTileRows;
  uint8_t* tile = w.data + static_cast<size_t>(row / kTileRows) * w.stride;
  place_numbers(scales, number_bytes(w.shape.scales), w.shape.num_scales, r, tile);
  if (zeros)
    place_numbers(zeros, number_bytes(w.shape.zeros), w.shape.num_scales, r,
                  tile + w.shape.zeros_offset());
  for (int k = 0; k < w.cols; k += kGroup) {
    uint8_t group[kGroup] = {};
    std::memcpy(group, codes + k, static_cast<size_t>(std::min(kGroup, w.cols - k)));
    place_group(w.format, group,
                tile + w.shape.codes_offset() +
                    static_cast<size_t>(k / kGroup) * unit_bytes(w.format) + 4 * r);
  }
}

}  // namespace

void check_table(const TableSpec& spec) {
  const auto require = [](bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
  };
  require(std::min(spec.rows, spec.cols) > 0 && std::max(spec.rows, spec.cols) <= 1 << 24,
          "a weight has 1 to 2^24 rows and columns");
  require(is_table(spec.format), "this format has no table of scales");
  require(spec.scale_columns == 16 || (spec.scale_columns > 0 && spec.scale_columns % kGroup == 0 &&
                                       spec.scale_columns <= 1 << 24),
          "columns that share a scale are 16, or a multiple of 32");
  require(spec.scales != Number::kNone && spec.scales != Number::kU8, "scales are floats");
  require(
      spec.zeros == Number::kNone || (spec.format != Format::kLookup4 && !is_float8(spec.format)),
      "codes of values have no zero point");
  for (const float v : spec.values) require(std::isfinite(v), "values of codes are finite");
}

Weight empty_table(const TableSpec& spec) {
  const int units = units_of(spec.cols), columns = std::min(spec.scale_columns, units * kGroup);
  const TileShape shape{units,       columns,    (spec.cols + columns - 1) / columns,
                        spec.scales, spec.zeros, lookup_of(spec.values)};
  const bool wide = is_float8(spec.format) || columns == 16 ||
                    spec.cols % kGroup;  // no integer sum is of one scale, or of columns alone
  return {spec.format, spec.rows, spec.cols, shape, tile_bytes(spec.format, shape), nullptr, wide};
}

void pack_table(const Weight& w, const TableRows& rows, Pool& pool) {
  const size_t scale_bytes = w.shape.num_scales * number_bytes(w.shape.scales),
               zero_bytes = w.shape.num_scales * number_bytes(w.shape.zeros);
  pool.parallel((rows.count + kTileRows - 1) / kTileRows, [&](int begin, int end, int) {
    for (int i = begin * kTileRows; i < std::min(end * kTileRows, rows.count); i++)
      place_row(w, rows.first + i, rows.codes + static_cast<size_t>(i) * w.cols,
                rows.scales + i * scale_bytes, zero_bytes ? rows.zeros + i * zero_bytes : nullptr);
  });
}

void check_table_blocks(const Weight& w, const Stored& stored) {
  const TableBlocks& blocks = table_blocks(stored.format);
  if (w.format != blocks.format || w.shape.scale_columns != blocks.scale_columns ||
      w.shape.scales != Number::kF16 || w.shape.zeros != Number::kNone ||
      !stored.row_scales.empty() || !stored.block_scales.empty() || !stored.values.empty())
    throw std::invalid_argument("a matrix of another kind than its blocks");
  check_rows(stored, blocks.columns, blocks.bytes);
}

void pack_table_blocks(const Weight& w, const Stored& stored, Pool& pool) {
  const TableBlocks& blocks = table_blocks(stored.format);
  const int num_blocks = w.cols / blocks.columns,
            block_scales = blocks.columns / blocks.scale_columns;
  pool.parallel(w.tiles(), [&](int begin, int end, int) {
    std::vector<uint8_t> codes(static_cast<size_t>(w.cols));
    std::vector<uint16_t> scales(static_cast<size_t>(w.shape.num_scales));
    for (int row = begin * kTileRows; row < std::min(end * kTileRows, w.rows); row++) {
      const uint8_t* from = stored.row(row, static_cast<size_t>(num_blocks) * blocks.bytes);
      for (int i = 0; i < num_blocks; i++, from += blocks.bytes)
        blocks.read(from, &codes[i * blocks.columns], &scales[i * block_scales]);
      place_row(w, row, codes.data(), reinterpret_cast<const uint8_t*>(scales.data()), nullptr);
    }
  });
}

float unpack_table(const Weight& w, const uint8_t* tile, int r, int k) {
  const Unit shape = unit_of(w.format);
  const size_t entry = static_cast<size_t>(k / w.shape.scale_columns) * kTileRows + r;
  const float scale = number(tile + entry * number_bytes(w.shape.scales), w.shape.scales);
  const uint8_t* lines = tile + w.shape.codes_offset() +
                         static_cast<size_t>(k / kGroup) * unit_bytes(w.format) + 4 * r;
  const int code = code_at(lines, shape.bits, k % kGroup);
  if (w.format == Format::kLookup4) return scale * w.shape.lookup.values[code];
  if (is_float8(w.format))
    return scale * small_float(static_cast<uint8_t>(code), w.format == Format::kFloat8E4 ? 3 : 2);
  if (w.shape.zeros == Number::kNone) return scale * static_cast<float>(code - shape.zero());
  const float zero =
      number(tile + w.shape.zeros_offset() + entry * number_bytes(w.shape.zeros), w.shape.zeros);
  return w.shape.zeros == Number::kU8 ? scale * (static_cast<float>(code) - zero)
                                      : scale * static_cast<float>(code) + zero;
}

}  // namespace headrace
