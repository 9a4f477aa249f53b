"""Tiles of linear ops, chosen for an H100. They change speed, no bit."""

from typing import Any, NamedTuple

import torch

from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.launch import blocks, power_of_2
from headrace.backend.cuda.layout import WeightLayout

_MULTIPROCESSORS = 132
_SHARED_BYTES = 200 << 10
"""Of the shared memory of a multiprocessor, what the programs on it fill with numbers on their way.
"""
_MOST_STAGES = 8


class Tile(NamedTuple):
    """Tile shape, as compile-time constants."""

    block_m: int
    block_n: int
    part: int
    """Columns of a product."""
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, Any]:
        """The tile as kernel arguments."""
        return {
            **{"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "PART": self.part},
            **{"num_warps": self.num_warps, "num_stages": self.num_stages},
        }


def tile_for(
    num_rows: int,
    num_outputs: int,
    cols: int,
    layout: WeightLayout,
    activations: torch.dtype,
    gate: bool,
) -> Tile:
    """Choose a tile by rows, outputs and columns."""
    if is_interpreting():
        return Tile(
            block_m=power_of_2(min(num_rows, 64), 16),
            block_n=power_of_2(min(num_outputs, 256), 16),
            part=layout.part,
            num_warps=4,
            num_stages=1,
        )
    if activations == torch.float32 or layout.store == "f32":
        return _wide(num_rows, num_outputs, layout)
    if num_rows <= 32:
        return _narrow(num_rows, num_outputs, cols, layout)
    block_m = power_of_2(min(num_rows, 64 if layout.outliers else 128))
    block_n, most = 32, 32 if layout.outliers else 64 if block_m == 64 else 128
    if block_m == 128 and num_rows > 512 and layout.store == "bf16" and not gate:
        most = 256
    while (
        block_n < most
        and blocks(num_rows, block_m) * blocks(num_outputs, 2 * block_n) > 0.9 * _MULTIPROCESSORS
    ):
        block_n *= 2
    stages = 4 if block_m * block_n <= 128 * (64 if layout.scale else 128) else 3
    return Tile(
        block_m=block_m,
        block_n=block_n,
        part=layout.part,
        num_warps=8 if block_m * block_n > 128 * 64 else 4,
        num_stages=stages,
    )


def _narrow(num_rows: int, num_outputs: int, cols: int, layout: WeightLayout) -> Tile:
    """Tile for few rows, whose time is reading the weight: two programs per multiprocessor.

    A warp multiplies 8 rows of the weight. 4-bit codes need tiles wider than high, or all warps
    would multiply the same.
    """
    block_m = power_of_2(num_rows, 16)
    block_n = block_m * (2 if layout.store == "int4" else 1)
    while block_n < 64 and blocks(num_outputs, 2 * block_n) >= 2 * _MULTIPROCESSORS:
        block_n *= 2
    part = 128 if layout.scale is None and cols % 128 == 0 else layout.part
    columns = 4 * part if layout.store == "int4" else part
    stage_bytes = block_n * layout.row_bytes(columns) + 2 * block_m * columns
    programs = min(4, blocks(blocks(num_outputs, block_n), _MULTIPROCESSORS))
    stages = min(_MOST_STAGES, max(3, _SHARED_BYTES // (programs * stage_bytes)))
    return Tile(
        block_m=block_m,
        block_n=block_n,
        part=part,
        num_warps=min(4, block_n // 8),
        num_stages=stages,
    )


def _wide(num_rows: int, num_outputs: int, layout: WeightLayout) -> Tile:
    """Tile for numbers that tensor cores do not multiply."""
    block_m, block_n = power_of_2(min(num_rows, 64), 16), 16
    while (
        block_n < 64
        and blocks(num_rows, block_m) * blocks(num_outputs, 2 * block_n) >= _MULTIPROCESSORS
    ):
        block_n *= 2
    return Tile(block_m=block_m, block_n=block_n, part=layout.part, num_warps=4, num_stages=3)
