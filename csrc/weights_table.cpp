#include "weights_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "codes.h"
#include "half.h"
#include "sparse.h"

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

// The number of the places of columns 4j .. 4j + 3, of a row's bits.
int places_at(const uint8_t* places, int j) {
  return kPlacesOfBits[places[j / 2] >> 4 * (j % 2) & 15];
}

void check_places(const uint8_t* places, int rows, int cols) {
  const size_t row_bytes = (static_cast<size_t>(cols) + 7) / 8;
  for (int r = 0; r < rows; r++, places += row_bytes) {
    bool fits = cols % 8 == 0 || places[row_bytes - 1] >> 4 == 0;
    for (int j = 0; j < cols / kSparseColumns; j++) fits &= places_at(places, j) >= 0;
    if (!fits)
      throw std::invalid_argument(
          "four columns have other than two kept values; the places are damaged");
  }
}

// Columns k .. k + n - 1 of a 2:4 matrix, of one group: their kept codes, and the bits of all
// columns of the row.
void place_sparse_group(Format format, const uint8_t* kept, const uint8_t* places, int k, int n,
                        uint8_t* lines) {
  uint32_t numbers = 0;
  for (int j = 0; j < n / kSparseColumns; j++)
    numbers |= static_cast<uint32_t>(places_at(places, k / kSparseColumns + j)) << 4 * j;
  std::memcpy(lines, &numbers, 4);
  const int num_kept = n / 2;
  if (format == Format::kSparseBf16) {
    for (int i = 0; i < num_kept; i += 2) std::memcpy(lines + 64 * (1 + i / 2), kept + 2 * i, 4);
    return;
  }
  const Unit shape = unit_of(format);
  for (int i = 0; i < num_kept; i++) {
    const int quad = i / 4, lines_of_codes = shape.bits / 2;
    lines[64 * (1 + quad % lines_of_codes) + i % 4] |=
        static_cast<uint8_t>((kept[i] ^ shape.zero()) << quad / lines_of_codes * shape.bits);
  }
}

// Column k of a 2:4 matrix, of the row whose bytes in the first line of the group these are:
// minus the zero code, or as bf16. 0 where it is not kept.
float sparse_value(Format format, const uint8_t* lines, int k) {
  uint32_t numbers;
  std::memcpy(&numbers, lines, 4);
  const int* at = kPlaces[numbers >> k / kSparseColumns * 4 & 7];
  const int column = k % kSparseColumns;
  if (column != at[0] && column != at[1]) return 0;
  const int i = k / kSparseColumns * kSparseKept + (column == at[1]);
  if (format == Format::kSparseBf16) {
    uint16_t bits;
    std::memcpy(&bits, lines + 64 * (1 + i / 2) + i % 2 * 2, 2);
    return bf16_to_float(bits);
  }
  const Unit shape = unit_of(format);
  const int quad = i / 4, lines_of_codes = shape.bits / 2, mask = (1 << shape.bits) - 1;
  const int code =
      lines[64 * (1 + quad % lines_of_codes) + i % 4] >> quad / lines_of_codes * shape.bits & mask;
  return static_cast<float>((code ^ shape.zero()) - shape.zero());
}

// A row of a matrix: codes, scales, and zeros or null, and the places of 2:4 weights.
void place_row(const Weight& w, int row, const uint8_t* codes, const uint8_t* scales,
               const uint8_t* zeros, const uint8_t* places = nullptr) {
  const int r = row % kTileRows;
  uint8_t* tile = w.data + static_cast<size_t>(row / kTileRows) * w.stride;
  place_numbers(scales, number_bytes(w.shape.scales), w.shape.num_scales, r, tile);
  if (zeros)
    place_numbers(zeros, number_bytes(w.shape.zeros), w.shape.num_scales, r,
                  tile + w.shape.zeros_offset());
  for (int k = 0; k < w.cols; k += kGroup) {
    uint8_t* lines = tile + w.shape.codes_offset() +
                     static_cast<size_t>(k / kGroup) * unit_bytes(w.format) + 4 * r;
    const int n = std::min(kGroup, w.cols - k);
    if (places) {
      const size_t kept = static_cast<size_t>(k / 2) * (w.format == Format::kSparseBf16 ? 2 : 1);
      place_sparse_group(w.format, codes + kept, places, k, n, lines);
      continue;
    }
    uint8_t group[kGroup] = {};
    std::memcpy(group, codes + k, static_cast<size_t>(n));
    place_group(w.format, group, lines);
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
  const bool unscaled = spec.format == Format::kSparseBf16;
  require(spec.scales != Number::kU8 && (spec.scales == Number::kNone) == unscaled,
          "scales are floats, and bf16 has none");
  require(spec.zeros == Number::kNone || (spec.format != Format::kLookup4 &&
                                          !is_float8(spec.format) && !is_sparse(spec.format)),
          "codes of values have no zero point, nor have 2:4 weights");
  require(!is_sparse(spec.format) || spec.cols % kSparseColumns == 0,
          "2:4 weights have a multiple of 4 columns");
  require(spec.format != Format::kSparseI8 ||
              (spec.scales == Number::kF32 && spec.scale_columns >= spec.cols &&
               spec.cols <= kMaxRowColumns),
          "int8 with one scale a row has it in float32, and at most 131,072 columns");
  for (const float v : spec.values) require(std::isfinite(v), "values of codes are finite");
}

Weight empty_table(const TableSpec& spec) {
  const int units = units_of(spec.cols), columns = std::min(spec.scale_columns, units * kGroup);
  const int num_scales = spec.scales == Number::kNone ? 0 : (spec.cols + columns - 1) / columns;
  const TileShape shape{units,       columns,    num_scales,
                        spec.scales, spec.zeros, lookup_of(spec.values)};
  const bool wide = is_grouped(spec.format) &&
                    (is_float8(spec.format) || columns == 16 ||
                     spec.cols % kGroup);  // no integer sum is of one scale, or of columns alone
  return {spec.format, spec.rows, spec.cols, shape, tile_bytes(spec.format, shape), nullptr, wide};
}

size_t code_row_bytes(const Weight& w) {
  if (!is_sparse(w.format)) return static_cast<size_t>(w.cols);
  return static_cast<size_t>(w.cols) / 2 * (w.format == Format::kSparseBf16 ? 2 : 1);
}

void pack_table(const Weight& w, const TableRows& rows, Pool& pool) {
  const size_t place_bytes = rows.places ? (static_cast<size_t>(w.cols) + 7) / 8 : 0;
  if (rows.places) check_places(rows.places, rows.count, w.cols);
  const size_t scale_bytes = w.shape.num_scales * number_bytes(w.shape.scales),
               zero_bytes = w.shape.num_scales * number_bytes(w.shape.zeros);
  pool.parallel((rows.count + kTileRows - 1) / kTileRows, [&](int begin, int end, int) {
    for (int i = begin * kTileRows; i < std::min(end * kTileRows, rows.count); i++)
      place_row(w, rows.first + i, rows.codes + i * code_row_bytes(w),
                rows.scales + i * scale_bytes, zero_bytes ? rows.zeros + i * zero_bytes : nullptr,
                rows.places ? rows.places + i * place_bytes : nullptr);
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
  const uint8_t* lines = tile + w.shape.codes_offset() +
                         static_cast<size_t>(k / kGroup) * unit_bytes(w.format) + 4 * r;
  if (w.format == Format::kSparseBf16) return sparse_value(w.format, lines, k % kGroup);
  const size_t entry = static_cast<size_t>(k / w.shape.scale_columns) * kTileRows + r;
  const float scale = number(tile + entry * number_bytes(w.shape.scales), w.shape.scales);
  if (is_sparse(w.format)) return scale * sparse_value(w.format, lines, k % kGroup);
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
