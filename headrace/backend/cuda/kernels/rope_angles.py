"""Rotation angles of rows."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.launch import Launch, blocks, power_of_2


@triton.jit(do_not_specialize=["rows"])
def rope_angles_kernel(
    out,
    positions,
    inverse_frequencies,
    rows,
    pairs,
    out_stride,
    scale,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Compute a tile of rows and pairs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)[None, :]
    mask = (row < rows) & (pair < pairs)
    position = tl.load(positions + row, row < rows, 0).to(tl.float64)
    # A float32 number of the size of a million knows its last bit to a sixteenth, and so would the
    # angle.
    angle = position * tl.load(inverse_frequencies + pair, pair < pairs, 0.0)
    to = out + row.to(tl.int64) * out_stride + pair
    tl.store(to, tl.cos(angle).to(tl.float32) * scale, mask)
    tl.store(to + pairs, tl.sin(angle).to(tl.float32) * scale, mask)


def rope_angles(out: Any, positions: Any, inverse_frequencies: Any, scale: float) -> Launch:
    """Compute cos and sin of positions[t] * inverse_frequencies, times `scale`: cosines, then
    sines.

    `out` is float32 [rows, 2 * pairs], `positions` int32 [rows], `inverse_frequencies` float64
    [pairs].
    """
    rows, pairs = len(out), len(inverse_frequencies)
    constants = {"ROWS": 4, "PAIRS": min(64, power_of_2(pairs)), "num_warps": 4}
    grid = (blocks(rows, constants["ROWS"]), blocks(pairs, constants["PAIRS"]))
    return Launch(
        rope_angles_kernel,
        grid,
        (out, positions, inverse_frequencies, rows, pairs, out.stride(0), scale),
        constants,
    )
