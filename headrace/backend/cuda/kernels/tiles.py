"""Tiles of products: those of a tuned table, or chosen by rule. They change speed, no bit."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from headrace.backend.cuda.architecture import Architecture, architecture
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.launch import blocks, power_of_2
from headrace.backend.cuda.layout import WeightLayout

_log = logging.getLogger("headrace.loader")

ROW_BUCKETS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows of activations for which tables have tiles. A tile serves all rows up to its bucket; the
last tile also serves more.
"""
_MIN_BLOCK_N = 64
"""Rows of a weight that four warps multiply together."""
_WARP_ROWS = 16
"""Rows of a weight that a warp multiplies with one instruction."""
_MAX_SPLITS = 8
_OTHER_SHARED_BYTES = 4 << 10
"""Shared memory of a program for other things than tiles on their way."""
_SHORT, _LONG = 512, 3072
"""Min columns of a range of codes, and of a range of any numbers."""


class Tile(NamedTuple):
    """Tile shape, as compile-time constants."""

    block_m: int  # Rows of activations
    block_n: int  # Rows of the weight
    is_parallel: bool  # Whether ranges of columns are programs of their own
    unroll: int  # Tiles of columns in a round of the loop
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, Any]:
        """The tile as kernel arguments."""
        return {
            **{"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "UNROLL": self.unroll},
            **{"num_warps": self.num_warps, "num_stages": self.num_stages},
        }


class Product(NamedTuple):
    """A weight and the type of activations: with the rows of a step, all that tiles depend on."""

    format: str  # `WeightLayout.name`
    rows: int
    cols: int
    activations: str  # Type in memory, and the type that is multiplied


TileTable = Mapping[tuple[Product, int], Tile]
"""Tiles by product and bucket of rows."""

_table: dict[tuple[Product, int], Tile] = {}


def use_tiles(table: TileTable) -> None:
    """Let later calls of `tile_for` take tiles from a table of this GPU."""
    global _table
    _table = dict(table)


def bucket_of(num_rows: int) -> int:
    return next((rows for rows in ROW_BUCKETS if num_rows <= rows), ROW_BUCKETS[-1])


def product_of(
    rows: int,
    cols: int,
    layout: WeightLayout,
    activations: torch.dtype,
    stored: torch.dtype | None = None,
) -> Product:
    """The key of a weight [rows, cols] in tables; see `tile_for`."""
    multiplied, in_memory = (str(t).removeprefix("torch.") for t in (activations, stored))
    is_converted = stored is not None and stored != activations
    types = f"{in_memory} as {multiplied}" if is_converted else multiplied
    return Product(layout.name, rows, cols, types)


def splits_for(rows: int, cols: int, layout: WeightLayout, activations: torch.dtype) -> int:
    """Number of ranges of a weight's columns whose sums are added in order.

    It depends on the weight alone, never on the rows of a step: it decides the bits. A matrix of
    few rows is cut until all multiprocessors have a part. Codes take longer to decode than to
    read, so they are cut into shorter ranges.
    """
    if activations == torch.float32 or layout.is_wide or layout.rows_in_int8:
        return 1
    tiles, multiprocessors = blocks(rows, _MIN_BLOCK_N), architecture().multiprocessors
    splits = 1
    while splits < _MAX_SPLITS:
        columns = cols // (2 * splits)
        is_idle = layout.scale is not None and tiles * splits < 0.9 * multiprocessors
        is_long = columns >= _LONG and tiles * splits < 1.5 * multiprocessors
        if not is_long and not (is_idle and columns >= _SHORT):
            break
        splits *= 2
    return splits


def tile_for(
    num_rows: int,
    rows: int,
    cols: int,
    layout: WeightLayout,
    activations: torch.dtype,
    *,
    splits: int,
    stored: torch.dtype | None = None,
) -> Tile:
    """The tuned tile of a weight [rows, cols] for a number of rows of activations, or the rule's.

    `stored` is the type that activations are loaded in, if they are multiplied in another.
    """
    tuned = _tuned(num_rows, rows, cols, layout, activations, splits, stored)
    return tuned or rule_tile(
        num_rows, rows, cols, layout, activations, splits=splits, stored=stored
    )


def rule_tile(
    num_rows: int,
    rows: int,
    cols: int,
    layout: WeightLayout,
    activations: torch.dtype,
    *,
    splits: int,
    stored: torch.dtype | None = None,
) -> Tile:
    """Choose a tile by rule; see `tile_for`."""
    if is_interpreting():
        # Large weights in large tiles: the interpreter takes milliseconds for a tile of any size.
        most_rows = 256 if rows < 512 else 2048
        return Tile(
            block_m=power_of_2(min(num_rows, 64), 16),
            block_n=power_of_2(min(rows, most_rows), 32),
            is_parallel=splits > 1 and num_rows <= 32,
            unroll=1,
            num_warps=4,
            num_stages=1,
        )
    gpu = architecture()
    if is_on_tensor_cores(layout, activations):
        tile = _on_tensor_cores(num_rows, rows, cols, layout, splits, gpu)
    else:
        tile = _wide(num_rows, rows, gpu)

    # Two tiles of columns must fit, or loads would wait for products.
    most = gpu.shared_bytes - _OTHER_SHARED_BYTES
    while tile.block_m > 16 and 2 * stage_bytes(tile, layout, activations, stored) > most:
        tile = tile._replace(block_m=tile.block_m // 2)
    return fitted(tile, layout, activations, stored)


def _tuned(
    num_rows: int,
    rows: int,
    cols: int,
    layout: WeightLayout,
    activations: torch.dtype,
    splits: int,
    stored: torch.dtype | None,
) -> Tile | None:
    """The tile of the table, if it has one that the kernel can run."""
    key = product_of(rows, cols, layout, activations, stored), bucket_of(num_rows)
    tile = _table.get(key)
    if tile is None:
        return None
    obstacle = obstacle_to(tile, layout, activations, splits, stored)
    if not obstacle:
        return tile
    del _table[key]
    _log.warning(
        "the tuned tile of %s x %s in %s, up to %s rows, is not used: %s",
        *(f"{rows:,}", f"{cols:,}", layout.name, f"{key[1]:,}", obstacle),
    )
    return None


def obstacle_to(
    tile: Tile,
    layout: WeightLayout,
    activations: torch.dtype,
    splits: int,
    stored: torch.dtype | None = None,
) -> str:
    """The reason why a tile cannot run, or would have other bits; or ""."""
    if tile.block_m not in (16, 32, 64, 128, 256) or tile.block_n not in (32, 64, 128, 256):
        return f"its sizes are {tile.block_m} x {tile.block_n}, not powers of two of 16 to 256"
    if tile.num_stages not in range(1, 9) or tile.unroll not in range(1, 5):
        return f"it has {tile.num_stages} stages and {tile.unroll} tiles a round, above 8 and 4"
    if tile.is_parallel and splits == 1:
        return "it needs ranges of columns, and the weight has one"
    if is_on_tensor_cores(layout, activations):
        # Four warps multiply 64 rows together: other shapes have other instructions and bits.
        most_warps = tile.block_n // _WARP_ROWS
        if tile.block_n % _MIN_BLOCK_N or tile.num_warps not in (4, 8, 16)[: most_warps // 4]:
            return f"{tile.num_warps} warps cannot multiply {tile.block_n} rows of a weight"
    elif tile.num_warps != 4:
        return f"it has {tile.num_warps} warps, not 4"
    needed = tile.num_stages * tile.unroll * stage_bytes(tile, layout, activations, stored)
    most = architecture().shared_bytes - _OTHER_SHARED_BYTES
    return f"it needs {needed:,} of {most:,} bytes of shared memory" if needed > most else ""


def is_on_tensor_cores(layout: WeightLayout, activations: torch.dtype) -> bool:
    return activations != torch.float32 and layout.store != "f32"


def tile_of_one_matrix(
    block_m: int,
    rows: int,
    layout: WeightLayout,
    activations: torch.dtype,
    stored: torch.dtype | None = None,
) -> Tile:
    """Choose a tile for a fixed number of rows of activations that share one of many matrices."""
    if is_interpreting():
        block_n = power_of_2(min(rows, 64), 16)
        return Tile(
            block_m=block_m,
            block_n=block_n,
            is_parallel=False,
            unroll=1,
            num_warps=4,
            num_stages=1,
        )
    tile = Tile(
        block_m=block_m,
        block_n=_MIN_BLOCK_N,
        is_parallel=False,
        unroll=2 if block_m < 64 else 1,
        num_warps=4,
        num_stages=4,
    )
    return fitted(tile, layout, activations, stored)


def fitted(
    tile: Tile,
    layout: WeightLayout,
    activations: torch.dtype,
    stored: torch.dtype | None = None,
) -> Tile:
    """Lower the stages, then the unrolling, until a tile fits into the GPU's shared memory."""
    size = stage_bytes(tile, layout, activations, stored)
    most = architecture().shared_bytes - _OTHER_SHARED_BYTES
    unroll, stages = tile.unroll, tile.num_stages
    while stages > 2 and stages * unroll * size > most:
        stages -= 1
    if stages * unroll * size > most:
        unroll = 1
    if stages * unroll * size > most:
        stages = 1
    return tile._replace(unroll=unroll, num_stages=stages)


def stage_bytes(
    tile: Tile,
    layout: WeightLayout,
    activations: torch.dtype,
    stored: torch.dtype | None = None,
) -> int:
    """Shared memory of a tile of columns on its way."""
    is_wide = torch.float32 in (activations, stored) or layout.is_wide
    size = 4 if is_wide else 2
    tables = sum(
        layout.table_words(number, layout.tile)
        for number in (layout.scale, layout.zero_store)
        if number
    )
    weight = tile.block_n * (layout.row_bytes(layout.tile) + 4 * tables)
    both = 1 + size if layout.outliers else 1 if layout.rows_in_int8 else size
    return weight + tile.block_m * layout.tile * both


def _is_faster_in_parallel(
    tile: Tile, num_rows: int, rows: int, cols: int, splits: int, multiprocessors: int
) -> bool:
    """Whether a program for each range of columns saves more than the partial sums cost.

    Seconds of an H100: 1.1e-6 for 128 columns of a tile, 2.5e12 bytes of sums per second,
    written and read, and 3e-6 until the last program has added them.
    """
    tiles = blocks(rows, tile.block_n) * blocks(num_rows, tile.block_m)
    at_once = multiprocessors * (2 if tile.block_n == _MIN_BLOCK_N else 1)
    alone = cols / 128 * 1.1e-6
    apart = alone * blocks(tiles * splits, at_once) / splits
    return apart + 8 * splits * num_rows * rows / 2.5e12 + 3e-6 < alone * blocks(tiles, at_once)


def _on_tensor_cores(
    num_rows: int, rows: int, cols: int, layout: WeightLayout, splits: int, gpu: Architecture
) -> Tile:
    # The fastest of benchmarks/cuda/tiles.py for the products of an 8B model on an H100. Where
    # warps multiply alone, decoded numbers and sums of large tiles exceed the registers.
    is_plain = layout.scale is None
    multiplies_alone = not (gpu.has_wgmma or gpu.capability[0] == 10)
    is_small = layout.outliers or (multiplies_alone and (layout.is_wide or not is_plain))
    block_m = power_of_2(min(num_rows, 64 if is_small else 128), 16)
    is_wide = blocks(rows, 2 * _MIN_BLOCK_N) * blocks(num_rows, block_m) >= gpu.multiprocessors
    block_n = 2 * _MIN_BLOCK_N if num_rows > 128 or (is_wide and block_m >= 64) else _MIN_BLOCK_N
    if is_plain and splits == 1 and not multiplies_alone:
        tiles = blocks(rows, block_n) * blocks(num_rows, 256)
        block_m = 256 if num_rows > 128 and tiles >= gpu.multiprocessors else block_m
    unroll, stages = 1, 3 if block_m == 256 or num_rows <= 128 < 2 * block_m else 4
    if block_m < 64:
        unroll = 2
        stages = (6 if splits == 1 else 3) if is_plain else 3 if layout.store == "int4" else 4
    elif block_m == 64 and is_plain:
        unroll, stages = 2, 3
    tile = Tile(
        block_m=block_m,
        block_n=block_n,
        is_parallel=False,
        unroll=unroll,
        num_warps=block_n // 16,
        num_stages=stages,
    )
    is_parallel = splits > 1 and _is_faster_in_parallel(
        tile, num_rows, rows, cols, splits, gpu.multiprocessors
    )
    return tile._replace(is_parallel=is_parallel)


def _wide(num_rows: int, rows: int, gpu: Architecture) -> Tile:
    """Tile for numbers that tensor cores do not multiply."""
    block_m, block_n = power_of_2(min(num_rows, 64), 16), 32
    while (
        block_n < 64
        and blocks(num_rows, block_m) * blocks(rows, 2 * block_n) >= gpu.multiprocessors
    ):
        block_n *= 2
    return Tile(
        block_m=block_m, block_n=block_n, is_parallel=False, unroll=1, num_warps=4, num_stages=3
    )
