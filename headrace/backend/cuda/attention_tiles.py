"""Sizes of attention's tiles, by the GPU, the heads, the KV format and the rows of a step."""

from typing import NamedTuple

from headrace._native import GpuWork
from headrace.backend.cuda.architecture import Architecture
from headrace.program.kv import KvGroup
from headrace.program.ops import Attention


class Tiles(NamedTuple):
    """Sizes of the tiles. `keys` and `split` decide bits and are equal for all launches over a
    store.
    """

    rows: int  # Query heads of several rows of the batch
    keys: int
    split: int
    programs: int
    num_warps: int
    num_stages: int
    is_turned: bool = False  # keys are the first operand
    min_units: int = 1  # of work; contexts are divided if a step has fewer
    narrow: "Tiles | None" = None  # for the sequences of a step that fit into smaller tiles

    @property
    def all(self) -> list["Tiles"]:
        """The tiles of each launch, the smallest first."""
        if not self.narrow:
            return [self]
        return [self.narrow._replace(keys=self.keys, split=self.split), self]


def tiles_for(group: KvGroup, dtype: str, gpu: Architecture, is_prefill: bool) -> Tiles:
    """Choose tiles for decoding and draft trees, or for steps with chunks of prompts."""
    dims = [max(dim, 16) for dim in (group.layout.key_dim, group.layout.value_dim) if dim]
    count, is_large = gpu.multiprocessors, max(dims) > 128
    if dtype == "f32":  # without tensor cores
        return Tiles(
            rows=32,
            keys=32,
            split=512,
            programs=2 * count,
            num_warps=8,
            num_stages=2,
            min_units=8 * count,
        )
    narrow = Tiles(
        rows=16,
        keys=32 if is_large else 64,
        split=512,
        programs=4 * count,
        num_warps=8 if max(dims) > 256 else 4,
        num_stages=3 if max(dims) > 256 else 5,
        is_turned=True,
        min_units=8 * count,
    )
    if not is_prefill or (max(dims) > 256 and not gpu.has_wgmma):
        return narrow
    # More rows do not fit into registers.
    is_narrow = is_large or (not gpu.has_wgmma and max(dims) > 64)
    wide = narrow._replace(
        rows=32 if is_narrow else 64,
        programs=8 * count,
        num_warps=8 if is_large else 4,
        num_stages=3,
        is_turned=is_narrow or not _sums_equally(gpu),
        min_units=count,
    )
    return wide._replace(narrow=narrow)


def _sums_equally(gpu: Architecture) -> bool:
    """Whether products have the same bits if keys are the second operand, not the first.

    GPUs before and after Hopper have one instruction for small and large tiles. On Hopper both
    instructions were measured: with an H100, they sum the same 16 numbers to the same bits. B200
    has an instruction for large tiles that was not measured.
    """
    return gpu.capability[0] != 10


def head_tiles(num_heads: int, num_kv_heads: int, tiles: Tiles) -> tuple[int, int]:
    """Number of tiles for the query heads of a KV head, and the heads per tile."""
    group = num_heads // num_kv_heads
    number = -(-group // tiles.rows)
    return number, -(-group // number)


def rows_per_tile(op: Attention, tiles: Tiles) -> int:
    """Rows of the batch in a tile."""
    return tiles.rows // head_tiles(op.num_heads, op.num_kv_heads, tiles)[1]


def work_of(op: Attention, tiles: Tiles) -> GpuWork:
    """Return the builder of this op's work; ops of a layer group with equal heads share it."""
    return GpuWork(
        rows_per_tile(op, tiles),
        op.num_kv_heads * head_tiles(op.num_heads, op.num_kv_heads, tiles)[0],
        tiles.min_units,
        tiles.split,
        op.window,
        op.num_sink_tokens if op.window else 0,
    )
