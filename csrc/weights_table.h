// Matrices whose scales lie in a table: one number of a packed one.
#pragma once
#include "weights.h"

namespace headrace {

// Column k of row r of a tile, as float32.
float unpack_table(const Weight& weight, const uint8_t* tile, int r, int k);

}  // namespace headrace
