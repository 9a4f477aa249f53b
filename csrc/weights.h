// Weights in memory: stored tensors repacked into tiles (format.h).
#pragma once
#include <array>
#include <span>
#include <string>
#include <vector>

#include "format.h"
#include "memory.h"
#include "pool.h"

namespace headrace {

// A matrix as it comes from a file: row after row of blocks in one of the formats that
// files know, and beside them the scales of the rows, or those of the blocks of each
// row, in formats that have these. Values that codes are the numbers of come with it
// where they are integers: 16, or the points of a grid.
struct Stored {
  std::string format;
  int rows, cols;
  const uint8_t* data;
  size_t bytes;
  std::span<const int64_t> row_order = {};     // row i is stored as row row_order[i]; empty: as is
  std::span<const float> row_scales = {};      // of the stored rows
  std::span<const uint8_t> block_scales = {};  // of the blocks of the stored rows
  std::span<const int8_t> values = {};

  // The bytes of row i, of so many each.
  const uint8_t* row(int i, size_t row_bytes) const {
    return data + static_cast<size_t>(row_order.empty() ? i : row_order[i]) * row_bytes;
  }
};

// A matrix whose scales lie in a table (format.h), before any of its rows is there.
struct TableSpec {
  Format format;
  int rows, cols;
  int scale_columns;  // columns that share a scale: 16, or a multiple of 32
  Number scales, zeros;
  std::array<float, 16> values = {};  // of kLookup4
};

// Rows of such a matrix, one after the other: first is a multiple of 16, and so is
// count unless they are the last.
struct TableRows {
  int first, count;
  const uint8_t* codes;   // [count][cols], or of 2:4 weights [count][cols / 2], the kept ones
  const uint8_t* scales;  // [count][scales of a row], numbers as the matrix has them
  const uint8_t* zeros;   // the same, or null
  const uint8_t* places = nullptr;  // of 2:4 weights [count][(cols + 7) / 8]: a bit for each column
};

// A packed matrix: ceil(rows / 16) tiles, `stride` bytes apart.
struct Weight {
  Format format;
  int rows, cols;
  TileShape shape;
  size_t stride;  // bytes from tile to tile; more than a tile when two matrices are interleaved
  uint8_t* data;
  bool wide = false;  // multiplied with float32 activations

  int tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  const uint8_t* tile(int i) const { return data + static_cast<size_t>(i) * stride; }
  Mode mode(bool offset) const {
    return wide ? Mode::kFloat : offset ? Mode::kInt8Offset : Mode::kInt8;
  }
};

// The packed format of a stored one. Throws std::invalid_argument for a name that is
// not known.
Format packed_format(const std::string& stored);

// Bytes that the packed tiles of a matrix take. Throws as packed_format does.
size_t packed_bytes(const std::string& format, int rows, int cols);

// Bytes of a vector of n floats: kernels read whole lines.
constexpr size_t vector_bytes(int n) { return static_cast<size_t>(n + 15) / 16 * 64; }

// Throws std::invalid_argument for parts that do not fit together.
void check_stored(const Stored& stored);

// The same for the rows alone, whose blocks have so many columns and bytes; returns how
// many rows are stored.
size_t check_rows(const Stored& stored, int block_columns, int block_bytes);

// A matrix without rows yet, of what has been checked, in `to` (zeroed, packed_bytes long when
// stride is the tile's own size). `points` are those of its grid, if it has one.
Weight empty_weight(const Stored& stored, const uint64_t* points, uint8_t* to, size_t stride);

// Repacks the rows of so many tiles.
void pack_tiles(const Stored& stored, const Weight& weight, int begin, int end);

// Throws std::invalid_argument for a matrix that no kernel reads.
void check_table(const TableSpec& spec);

// A matrix without rows yet, of what has been checked; `data` comes later.
Weight empty_table(const TableSpec& spec);

// Bytes of the codes of a row of such a matrix, as its rows come.
size_t code_row_bytes(const Weight& weight);

// Packs rows into their tiles, with all threads. Throws std::invalid_argument for places of 2:4
// weights that are not two of every four columns.
void pack_table(const Weight& weight, const TableRows& rows, Pool& pool);

// Packs all rows of such a matrix as they come from a file; the first throws
// std::invalid_argument for blocks that are not of its kind.
void check_table_blocks(const Weight& weight, const Stored& stored);
void pack_table_blocks(const Weight& weight, const Stored& stored, Pool& pool);

// Row `row` of a packed matrix as float32.
void unpack_row(const Weight& weight, int row, float* out);

}  // namespace headrace
