#include "copies.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace headrace {
namespace {

// Chunks of a panel: a column's run is then up to 256 bytes, and threads have panels to share.
int panel_tiles_of(const Weight& weight, int threads) {
  const int chunk = chunk_tiles(unit_of(weight.format).bits),
            chunks = (weight.tiles() + chunk - 1) / chunk;
  return chunk * std::clamp(chunks / (2 * threads), 1, 4);
}

int groups_of(const Weight& weight) { return weight.shape.units * unit_of(weight.format).groups(); }

template <Format F>
size_t panel_bytes(const Weight& weight, int panel_tiles) {
  const PanelShape<F> shape(panel_tiles, weight.shape);
  return shape.scales + weight.shape.units * shape.unit;
}

// Codes of group g of a tile: 64 bytes a line.
template <Format F>
const uint8_t* lines_of(const Weight& weight, int tile, int g) {
  constexpr Unit U = unit_of(F);
  const size_t front = is_table(F) ? weight.shape.codes_offset() : 0;
  return weight.tile(tile) + front + static_cast<size_t>(g / U.groups()) * U.bytes() +
         U.codes_offset() + static_cast<size_t>(g % U.groups()) * U.lines_per_group() * 64;
}

// The codes of a group of one row, from its 4 bytes of each line.
template <int kBits>
void unpack(const uint8_t* lines, uint8_t (&codes)[kGroup]) {
  for (int j = 0; j < kBits; j++)
    for (int b = 0; b < 4; b++) {
      const uint8_t byte = lines[64 * j + b];
      codes[4 * j + b] = kBits == 8 ? byte : byte & 15;
      if (kBits == 4) codes[16 + 4 * j + b] = byte >> 4;
    }
}

template <Format F>
void fill_panel(const Weight& weight, const ColumnCopy& copy, int panel) {
  constexpr Unit U = unit_of(F);
  const PanelShape<F> shape(copy.panel_tiles, weight.shape);
  uint8_t* to = copy.data + panel * copy.stride;
  const int first = panel * copy.panel_tiles,
            tiles = std::min(copy.panel_tiles, weight.tiles() - first);
  for (int t = 0; t < tiles; t++) {
    const uint8_t* tile = weight.tile(first + t);
    for (int u = 0; u < (is_table(F) ? 1 : weight.shape.units); u++)
      std::memcpy(to + shape.tile_header(u, t), tile + static_cast<size_t>(u) * U.bytes(),
                  shape.header);
    for (int g = 0; g < groups_of(weight); g++)
      for (int r = 0; r < kTileRows; r++) {
        uint8_t codes[kGroup];
        unpack<U.bits>(lines_of<F>(weight, first + t, g) + 4 * r, codes);
        // Row 16 j + 4 l + i of 64 lies at 16 l + 4 j + i.
        const int j = t % 4, at = 16 * (r / 4) + 4 * j + r % 4;
        const int chunk = t / chunk_tiles(U.bits), high = t % chunk_tiles(U.bits) >= 4;
        uint8_t* run = to + shape.codes(g, copy.panel_tiles) + 64 * chunk + at;
        for (int c = 0; c < kGroup; c++, run += shape.run)
          *run |= static_cast<uint8_t>(codes[c] << (high ? 4 : 0));
      }
  }
}

template <Format F>
size_t bytes_of_row(const TileShape& shape) {
  constexpr Unit U = unit_of(F);
  const size_t scales =
      is_table(F) ? shape.num_scales * (number_bytes(shape.scales) + number_bytes(shape.zeros))
                  : static_cast<size_t>(shape.units) * U.codes_offset() / kTileRows;
  const size_t codes = static_cast<size_t>(shape.units) * U.groups() * U.lines_per_group() * 4;
  return ((scales + 3) / 4 * 4 + codes + 63) / 64 * 64;
}

template <Format F>
void fill_row(const Weight& weight, const RowCopy& copy, int row) {
  constexpr Unit U = unit_of(F);
  const uint8_t* tile = weight.tile(row / kTileRows);
  const int r = row % kTileRows;
  uint8_t *to = copy.data + row * copy.stride, *const start = to;
  const auto numbers = [&](const uint8_t* from, int count, size_t bytes) {
    for (int i = 0; i < count; i++, to += bytes)
      std::memcpy(to, from + (kTileRows * static_cast<size_t>(i) + r) * bytes, bytes);
  };
  if (is_table(F)) {
    const TileShape& shape = weight.shape;
    numbers(tile, shape.num_scales, number_bytes(shape.scales));
    numbers(tile + shape.zeros_offset(), shape.zeros == Number::kNone ? 0 : shape.num_scales,
            number_bytes(shape.zeros));
  } else {
    constexpr int halves = is_super(U.scales) ? 2 : U.codes_offset() / 32,
                  bytes = is_super(U.scales) ? (U.codes_offset() - 64) / 16 : 0;
    for (int u = 0; u < weight.shape.units; u++)
      numbers(tile + static_cast<size_t>(u) * U.bytes(), halves, 2);
    for (int u = 0; u < weight.shape.units; u++)
      numbers(tile + static_cast<size_t>(u) * U.bytes() + 32 * halves, bytes, 1);
  }
  to = start + (to - start + 3) / 4 * 4;
  for (int g = 0; g < groups_of(weight); g++)
    for (int j = 0; j < U.lines_per_group(); j++, to += 4)
      std::memcpy(to, lines_of<F>(weight, row / kTileRows, g) + 64 * j + 4 * r, 4);
}

// Calls f<F>() for a format that has copies.
template <class F>
auto by_format(Format format, F&& f) {
  switch (format) {
    case Format::kQ4:
      return f.template operator()<Format::kQ4>();
    case Format::kQ4Min:
      return f.template operator()<Format::kQ4Min>();
    case Format::kQ4Super:
      return f.template operator()<Format::kQ4Super>();
    case Format::kTable4:
      return f.template operator()<Format::kTable4>();
    case Format::kTable8:
      return f.template operator()<Format::kTable8>();
    default:
      return f.template operator()<Format::kQ8>();
  }
}

}  // namespace

size_t copy_bytes(const Weight& weight, bool by_rows) {
  if (!has_copies(weight)) return 0;
  return by_rows ? MatrixCopies::row_bytes(weight) : MatrixCopies::column_bytes(weight, 1);
}

size_t MatrixCopies::column_bytes(const Weight& weight, int threads) {
  const int tiles = panel_tiles_of(weight, threads);
  const size_t panel =
      by_format(weight.format, [&]<Format F>() { return panel_bytes<F>(weight, tiles); });
  return panel * ColumnCopy{tiles}.panels(weight.tiles());
}

size_t MatrixCopies::row_bytes(const Weight& weight) {
  return weight.rows *
         by_format(weight.format, [&]<Format F>() { return bytes_of_row<F>(weight.shape); });
}

void MatrixCopies::add_columns(int number, const Weight& weight, int threads, uint8_t* to) {
  ColumnCopy copy{panel_tiles_of(weight, threads)};
  copy.stride = column_bytes(weight, threads) / copy.panels(weight.tiles());
  copy.data = to;
  columns_[number] = copy;
  new_.push_back({number, weight, Kind::kColumns});
}

void MatrixCopies::add_rows(int number, const Weight& weight, uint8_t* to) {
  rows_[number] = {row_bytes(weight) / weight.rows, to};
  new_.push_back({number, weight, Kind::kRows});
}

void MatrixCopies::add_tiles(int number, const Weight& weight, size_t bytes, uint8_t* to) {
  Weight copy = weight;
  copy.data = to;
  copy.stride = bytes;
  tiles_.emplace(number, copy);
  new_.push_back({number, weight, Kind::kTiles});
}

void MatrixCopies::fill(Pool& pool) {
  for (const New& made : new_) {
    const Weight& w = made.weight;
    if (made.kind == Kind::kColumns) {
      const ColumnCopy& copy = columns_.at(made.number);
      pool.parallel(copy.panels(w.tiles()), [&](int begin, int end, int) {
        for (int panel = begin; panel < end; panel++)
          by_format(w.format, [&]<Format F>() { fill_panel<F>(w, copy, panel); });
      });
    } else if (made.kind == Kind::kTiles) {
      const Weight& copy = tiles_.at(made.number);
      pool.parallel(w.tiles(), [&](int begin, int end, int) {
        for (int tile = begin; tile < end; tile++)
          std::memcpy(copy.data + tile * copy.stride, w.tile(tile), copy.stride);
      });
    } else {
      const RowCopy& copy = rows_.at(made.number);
      pool.parallel(w.tiles(), [&](int begin, int end, int) {
        for (int row = begin * kTileRows; row < std::min(end * kTileRows, w.rows); row++)
          by_format(w.format, [&]<Format F>() { fill_row<F>(w, copy, row); });
      });
    }
  }
  new_.clear();
}

#define HR_COPIES(isa) const CopyKernels* copy_kernels_##isa();
HR_COPIES(portable)
#ifdef HEADRACE_ISA_avx2
HR_COPIES(avx2)
#endif
#ifdef HEADRACE_ISA_avx512
HR_COPIES(avx512)
#endif
#ifdef HEADRACE_ISA_avx512bf16
HR_COPIES(avx512bf16)
#endif
#ifdef HEADRACE_ISA_neon
HR_COPIES(neon)
#endif
#undef HR_COPIES

const CopyKernels& copy_kernels(const char* isa) {
  const std::string name = isa;
#ifdef HEADRACE_ISA_avx2
  if (name == "avx2") return *copy_kernels_avx2();
#endif
#ifdef HEADRACE_ISA_avx512
  if (name == "avx512") return *copy_kernels_avx512();
#endif
#ifdef HEADRACE_ISA_avx512bf16
  if (name == "avx512bf16") return *copy_kernels_avx512bf16();
#endif
#ifdef HEADRACE_ISA_neon
  if (name == "neon") return *copy_kernels_neon();
#endif
  return *copy_kernels_portable();
}

}  // namespace headrace
