// Matrices whose scales lie in a table: one number of a packed one, and blocks of files
// that are taken apart into such rows.
#pragma once
#include <string>

#include "weights.h"

namespace headrace {

// Column k of row r of a tile, as float32.
float unpack_table(const Weight& weight, const uint8_t* tile, int r, int k);

// Blocks that are codes and f16 scales, those of `scale_columns` columns each.
struct TableBlocks {
  const char* name;
  Format format;
  int columns, bytes, scale_columns;
  void (*read)(const uint8_t* block, uint8_t* codes, uint16_t* scales);
};

// Those of the type of this name. Throws std::invalid_argument where there are none.
const TableBlocks& table_blocks(const std::string& name);

}  // namespace headrace
