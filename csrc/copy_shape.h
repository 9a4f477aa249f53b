// Copies of matrices that a step reads in part, because some of its activations are 0.
//
// By columns: a panel is some tiles of 16 rows. For each unit it has the scales of its tiles, then
// one run of codes for each column: the codes of 64 rows are 64 bytes, of 4 bits those of 128 rows,
// the first 64 in the low nibbles. Four runs interleave to lines of a tile (format.h), so in 64
// bytes the row 16 j + 4 l + i lies at 16 l + 4 j + i.
//
// By rows: the scales of a row, then its 4 bytes of each line. Sixteen of any rows make a tile.
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

struct RowCopy {
  size_t stride = 0;  // bytes from row to row
  uint8_t* data = nullptr;
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

struct CopyKernels {
  void (*columns[kNumFormats])(const ColumnWork&);  // null: no copies
  // Sixteen rows of a copy by rows to a tile.
  void (*gather[kNumFormats])(const uint8_t* const rows[kTileRows], const TileShape& shape,
                              uint8_t* tile);
};

// Of an instruction set by name.
const CopyKernels& copy_kernels(const char* isa);

}  // namespace headrace
