// Weights in memory: stored tensors repacked into tiles (format.h).
#pragma once
#include <span>
#include <string>
#include <vector>

#include "format.h"
#include "memory.h"
#include "pool.h"

namespace headrace {

// A matrix as it comes from a file: row after row of blocks in one of the formats that files know, and beside them the scales of the
// rows, or those of the blocks of each row, in formats that have these.
struct Stored {
  std::string format;
  int rows, cols;
  const uint8_t* data;
  size_t bytes;
  std::span<const int64_t> row_order = {};     // row i is stored as row row_order[i]; empty: as is
  std::span<const float> row_scales = {};      // of the stored rows
  std::span<const uint8_t> block_scales = {};  // of the blocks of the stored rows
};

// A packed matrix: ceil(rows / 16) tiles, `stride` bytes apart.
struct Weight {
  Format format;
  int rows, cols;
  int units;      // units of a tile
  size_t stride;  // bytes from tile to tile; more than a tile when two matrices are interleaved
  const uint8_t* data;

  int tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  const uint8_t* tile(int i) const { return data + static_cast<size_t>(i) * stride; }
};

// The packed format of a stored one. Throws std::invalid_argument for a name that is not known.
Format packed_format(const std::string& stored);

// Bytes that the packed tiles of a matrix take. Throws as packed_format does.
size_t packed_bytes(const std::string& format, int rows, int cols);

// Bytes of a vector of n floats: kernels read whole lines.
constexpr size_t vector_bytes(int n) { return static_cast<size_t>(n + 15) / 16 * 64; }

// Throws std::invalid_argument for parts that do not fit together.
void check_stored(const Stored& stored);

// Repacks what has been checked into `to` (zeroed, packed_bytes long when stride is the tile's own size), with all threads.
Weight pack(const Stored& stored, uint8_t* to, size_t stride, Pool& pool);

// Row `row` of a packed matrix as float32.
void unpack_row(const Weight& weight, int row, float* out);

}  // namespace headrace
