// Matrices whose codes are numbers of points of a grid: the IQ1, IQ2 and IQ3 types of
// GGUF files (format.h).
#pragma once
#include <span>
#include <string>
#include <vector>

#include "weights.h"

namespace headrace {

// How blocks of the type of this name are decoded; null for one that has no grid.
const Grid* find_grid(const std::string& name);

// The points of a grid as `Grid::decode` takes them, from integers [points, columns of
// a point]. Throws std::invalid_argument for other than the grid has, or larger ones
// than codes have room for.
std::vector<uint64_t> points_of(const Grid& grid, std::span<const int8_t> integers);

// Row `row` of a packed matrix as float32.
void unpack_grid_row(const Weight& weight, int row, float* out);

}  // namespace headrace
