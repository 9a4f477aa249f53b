// Tiles of outputs, as linear ops and experts compute them: 16 columns for up to 16
// rows of a block.
#pragma once
#include <algorithm>
#include <cstring>

#include "plan.h"

namespace headrace {

constexpr int kMaxBlockRows = 16;

// Tile `t` of a weight times a block of `rows` activation rows: out[rows][16], plus the
// bias unless that is null.
inline void multiply(const Plan& plan, const Weight& w, int t, bool offset, const uint8_t* block,
                     int rows, const float* bias, float* out, const Aside& aside = {}) {
  const Kernels& k = plan.kernels();
  k.matmul[static_cast<int>(w.mode(offset))][static_cast<int>(w.format)][rows - 1](
      w.tile(t), w.shape, block, out, aside);
  if (!bias) return;
  for (int m = 0; m < rows; m++) k.add(out + 16 * m, bias + 16 * t, out + 16 * m, 16);
}

// Writes columns 32 group .. of block `b`, rows[m][32], to a buffer, packed or not.
inline void write_group(const Plan& plan, const Buffer& out, const Blocks& blocks, int b, int group,
                        const float* rows) {
  const int first = kGroup * group, n = std::clamp(out.width - first, 0, kGroup),
            row = blocks.first(b);
  if (out.packed) return plan.pack_columns(out, row, blocks.rows(b), first, rows, kGroup, n);
  for (int m = 0; m < blocks.rows(b); m++)
    std::memcpy(out.row(row + m) + first, rows + kGroup * m, static_cast<size_t>(n) * 4);
}

// The weights of a gated unit, and their biases or null.
struct GatedUnit {
  const Weight &gate, &up;
  const float *gate_bias, *up_bias;
};

// Columns 32 group .. of a gated unit: out[rows][32], with zeros beyond the width.
// `gate_block` and `up_block` are the same rows, each in the form that its weight is
// multiplied with; `activate` makes a tile of what comes of gate and up.
inline void gated_group(const Plan& plan, const GatedUnit& unit, int group,
                        const uint8_t* gate_block, const uint8_t* up_block, int rows,
                        Kernels::GluTile activate, float* out) {
  alignas(64) float gate[kMaxBlockRows * 16], up[kMaxBlockRows * 16];
  for (int half = 0; half < 2; half++) {
    const int t = 2 * group + half;
    if (t < unit.gate.tiles()) {
      multiply(plan, unit.gate, t, false, gate_block, rows, unit.gate_bias, gate);
      multiply(plan, unit.up, t, false, up_block, rows, unit.up_bias, up);
      activate(gate, up, rows, out + 16 * half, kGroup);
    } else {
      for (int m = 0; m < rows; m++) std::fill_n(out + kGroup * m + 16 * half, 16, 0.0f);
    }
  }
}

}  // namespace headrace
