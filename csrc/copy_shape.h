// Copies of matrices that a step reads in part, because some of its activations are 0.
//
// By columns: a panel is some tiles of 16 rows. For each unit it has the scales of its tiles, then
// one run of codes for each column: the codes of 64 rows are 64 bytes, of 4 bits those of 128 rows,
// the first 64 in the low nibbles. Four runs interleave to lines of a tile (format.h), so in 64
// bytes the row 16 j + 4 l + i lies at 16 l + 4 j + i.
//
// By rows: the scales of the groups of a row as float32, their minima if there are any, then its
// codes, four groups at a time: the first 16 columns of each, then the others, of codes of 4 bits
// in the low and high nibbles of the same bytes.
//
// Both give the bits of the whole matrix: integer sums are exact, and float sums have its order.
#pragma once
#include "format.h"

namespace headrace {

// Formats that have copies: int8 activations by groups, scales of whole groups.
constexpr bool has_copies(Format f) {
  return f == Format::kQ4 || f == Format::kQ4Min || f == Format::kQ4Super || f == Format::kQ8 ||
         f == Format::kTable4 || f == Format::kTable8;
}

struct ColumnCopy {
  int panel_tiles = 0;  // whole chunks of 64 bytes of a column
  size_t stride = 0;    // bytes from panel to panel
  uint8_t* data = nullptr;

  int panels(int tiles) const { return (tiles + panel_tiles - 1) / panel_tiles; }
};

// How the rows of a copy lie.
struct RowShape {
  int groups = 0;
  bool shifted = false;  // whether there are minima
  int bits = 0;

  constexpr int quads() const { return (groups + 3) / 4; }
  // Groups in whole vectors of floats.
  constexpr int padded() const { return (groups + 15) / 16 * 16; }
  constexpr size_t codes_offset() const {
    return static_cast<size_t>(padded()) * (shifted ? 8 : 4);
  }
  constexpr size_t bytes() const {  // from row to row
    return codes_offset() + static_cast<size_t>(quads()) * 16 * bits;
  }
};

struct RowCopy {
  RowShape shape;
  uint8_t* data = nullptr;

  const uint8_t* row(int i) const { return data + static_cast<size_t>(i) * shape.bytes(); }
};

// Tiles whose codes of one column fill 64 bytes.
constexpr int chunk_tiles(int bits) { return 32 / bits; }

// Where the parts of a panel lie.
template <Format F>
struct PanelShape {
  static constexpr Unit U = unit_of(F);
  size_t run, header, unit;  // bytes of a column, of a tile's scales, of a unit (of a table: group)
  size_t scales;             // bytes of scales in front of all units

  constexpr PanelShape(int panel_tiles, const TileShape& shape)
      : run(static_cast<size_t>(panel_tiles) * 2 * U.bits),
        header(is_table(F) ? shape.codes_offset() : U.codes_offset()),
        unit((is_table(F) ? 0 : panel_tiles * header) + U.columns() * run),
        scales(is_table(F) ? panel_tiles * header : 0) {}
  constexpr size_t tile_header(int u, int tile) const {
    return (is_table(F) ? 0 : u * unit) + tile * header;
  }
  // The runs of group g of all.
  constexpr size_t codes(int g, int panel_tiles) const {
    return scales + g / U.groups() * unit + (is_table(F) ? 0 : panel_tiles * header) +
           g % U.groups() * kGroup * run;
  }
};

// The columns of a block of activations that are not 0 in all rows, four at a time.
struct UnionOfColumns {
  const int32_t* first;    // [groups + 1] quads before each group
  const uint8_t* columns;  // [quads][4] in the group; what fills the last quad is 0 in x
  const int8_t* x;         // [groups][rows][32] the activations in this order
};

// Some rows of outputs of a panel: out[tiles][rows][16].
struct ColumnWork {
  const uint8_t* panel;
  int panel_tiles, tiles;  // of the panel; that are there, in whole chunks
  const TileShape& shape;
  int groups, rows;
  const uint8_t* block;  // of activations, for their scales
  const UnionOfColumns& x;
  float* out;
};

// A row of activations, as rows of a copy are multiplied with it.
struct RowInput {
  const int8_t* x;        // [quads][2][4][16] halves of four groups
  const int32_t* starts;  // [padded groups] minus the zero code times the sum of a group
  const float* scales;    // [padded groups]
  const float* sums;      // [padded groups] scales times sums
};

// out[i] = row i of a copy, of `count` of any, times x.
struct RowWork {
  const uint8_t* const* rows;
  int count;
  const RowShape& shape;
  RowInput x;
  float* out;
};

struct CopyKernels {
  void (*columns[kNumFormats])(const ColumnWork&);  // null: no copies
  void (*rows[kNumFormats])(const RowWork&);
  // The scales of group g of the 16 rows of a tile, and their minima if there are any.
  void (*scales[kNumFormats])(const uint8_t* tile, const TileShape& shape, int g, float* scales,
                              float* minima);
};

// Of an instruction set by name.
const CopyKernels& copy_kernels(const char* isa);

}  // namespace headrace
