"""Times the tiles that a product could have on this GPU, with weights that no cache holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch

from headrace.backend.cuda.compile_kernels import compile_kernels
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.tiles import (
    ROW_BUCKETS,
    Product,
    Tile,
    is_on_tensor_cores,
    obstacle_to,
    product_of,
    rule_tile,
    splits_for,
)
from headrace.backend.cuda.launch import Launch, blocks
from headrace.backend.cuda.layout import WeightLayout, layout_of
from headrace.backend.cuda.memory import device_errors
from headrace.backend.cuda.packing import PackedWeight
from headrace.backend.cuda.random_weight import random_weight
from headrace.backend.cuda.step_shape import MAX_GRAPH_ROWS
from headrace.backend.cuda.stream import make_stream
from headrace.backend.cuda.tile_table import TunedTile
from headrace.backend.cuda.timing import seconds
from headrace.backend.cuda.weights import can_stack, read_wide
from headrace.backend.cuda.workspace import Buffers, Workspace
from headrace.program import ops
from headrace.program.fuse import LINEAR_OPS
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

COLD_BYTES = 256 << 20
"""Bytes of weights that are read in turn: none is still in the L2 cache when it comes again."""
_FIRST_ROUNDS, _LAST_ROUNDS = 3, 7
_FINALISTS = 3
_MIN_GAIN = 1.02
"""How much faster a tile must be to replace the rule's: less is noise."""

Clock = Callable[[Callable[[], object], int, int], list[float]]
"""Device seconds of a run, in each of some rounds of several runs: `timing.seconds`."""


class Linear(NamedTuple):
    """The weight of a linear op, or several stacked, and its activations."""

    layout: WeightLayout
    rows: int
    cols: int
    is_gated: bool
    activations: torch.dtype  # Type that is multiplied
    stored: torch.dtype  # Type in memory
    max_rows: int  # Rows of the largest steps that it is tuned for

    @property
    def product(self) -> Product:
        return product_of(self.rows, self.cols, self.layout, self.activations, self.stored)

    @property
    def splits(self) -> int:
        return splits_for(self.rows, self.cols, self.layout, self.activations)


def linears_of(
    program: Program, tensors: Mapping[str, StoredTensor], activations: torch.dtype
) -> list[Linear]:
    """The distinct weights of a lowered program's linear ops, stacked as in `Lowering.linear`."""
    buffers = Buffers(program, activations, read_wide(program, tensors))
    found: dict[Product, Linear] = {}
    for op in program.ops:
        if not isinstance(op, LINEAR_OPS):
            continue
        stored = [tensors[weight.name] for weight in op.matrices()]
        for stack in [stored] if can_stack(stored) else [[tensor] for tensor in stored]:
            weight = Linear(
                layout=layout_of(stack[0]),
                rows=sum(tensor.rows for tensor in stack),
                cols=stack[0].cols,
                is_gated=isinstance(op, ops.GluLinear) and len(stack) == 2,
                activations=activations,
                stored=buffers.dtype(op.x),
                max_rows=_max_rows(op),
            )
            found.setdefault(weight.product, weight)
    return list(found.values())


def _max_rows(op: Any) -> int:
    # Steps of prompts have logits for their last rows alone.
    is_logits = op.x.rows == "logit"
    return MAX_GRAPH_ROWS if is_logits else ROW_BUCKETS[-1]


def candidates(weight: Linear, chosen: Tile) -> Iterator[Tile]:
    """The tiles to try in place of the chosen tile, all with the bits of its sums."""
    heights = {chosen.block_m}
    if chosen.block_m > 64:
        heights |= {chosen.block_m // 2, min(256, 2 * chosen.block_m)}
    on_tensor_cores = is_on_tensor_cores(weight.layout, weight.activations)
    widths: tuple[int, ...] = (64, 128) if on_tensor_cores else (32, 64)
    stages: tuple[int, ...] = (2, 3, 4)
    unrolls: tuple[int, ...] = (1, 2)
    if chosen.block_m < 64:
        # Fewer instructions a weight: tiles that are wide, or several a round.
        widths, stages, unrolls = (*widths, 2 * widths[-1]), (2, 3, 4, 6), (1, 2, 4)
    if is_interpreting():
        widths, stages, unrolls = widths[:2], (1,), (1,)
    for block_m, block_n, is_parallel, unroll, warps, num_stages in product(
        sorted(heights), widths, sorted({False, weight.splits > 1}), unrolls, (4, 8), stages
    ):
        tile = Tile(
            block_m=block_m,
            block_n=block_n,
            is_parallel=is_parallel,
            unroll=unroll,
            num_warps=warps,
            num_stages=num_stages,
        )
        if not obstacle_to(tile, weight.layout, weight.activations, weight.splits, weight.stored):
            yield tile


class Tuner:
    """Tunes the tiles of one weight, of which it holds enough copies to overflow the L2 cache."""

    def __init__(self, weight: Linear, clock: Clock = seconds) -> None:
        self.weight, self._clock = weight, clock
        self._stream, self._workspace = make_stream(), Workspace()
        self._weights: list[PackedWeight] = []

    def rule_tile(self, num_rows: int) -> Tile:
        weight = self.weight
        return rule_tile(
            num_rows,
            weight.rows,
            weight.cols,
            weight.layout,
            weight.activations,
            splits=weight.splits,
            stored=weight.stored,
        )

    @device_errors
    def tune(self, num_rows: int) -> tuple[Tile, TunedTile]:
        """The tile of the rule, and the fastest, for a number of rows of activations.

        Raises MemoryLimitError if the GPU has no room for the weights.
        """
        weight, before = self.weight, self.rule_tile(num_rows)
        took = self.time(num_rows, dict.fromkeys([before, *candidates(weight, before)]))
        now = min(took, key=lambda tile: took[tile])
        now = now if took[before] >= _MIN_GAIN * took[now] else before
        return before, TunedTile(
            product=weight.product,
            max_rows=num_rows,
            tile=now,
            microseconds=1e6 * took[now],
            microseconds_before=1e6 * took[before],
        )

    def time(self, num_rows: int, tiles: Sequence[Tile] | Mapping[Tile, Any]) -> dict[Tile, float]:
        """Median seconds of a product with each tile that compiles; the fastest and the first tile
        are timed again, in turns.
        """
        self._weights = self._weights or self._make_weights()
        launches = {tile: self._launches(num_rows, tile) for tile in tiles}
        compile_kernels(each[0] for each in launches.values())
        runs = {
            tile: self._stream.capture(each) for tile, each in launches.items() if _runs(each[0])
        }
        first = next(iter(tiles))
        assert first in runs, "the rule's tile runs on every GPU"

        took = {tile: median(self._clock(run, _FIRST_ROUNDS, 1)) for tile, run in runs.items()}
        fastest = sorted(runs, key=lambda tile: took[tile])[:_FINALISTS]
        finalists = dict.fromkeys([first, *fastest])
        turns = [
            [self._clock(runs[tile], 1, 1)[0] for tile in finalists] for _ in range(_LAST_ROUNDS)
        ]
        took |= dict(zip(finalists, map(median, zip(*turns, strict=True)), strict=True))
        return {tile: time / len(self._weights) for tile, time in took.items()}

    def _make_weights(self) -> list[PackedWeight]:
        weight = self.weight
        number = blocks(COLD_BYTES, weight.layout.nbytes(weight.rows, weight.cols))
        return [
            random_weight(weight.layout, weight.rows, weight.cols, DEVICE)
            for _ in range(2 if is_interpreting() else number)
        ]

    def _launches(self, num_rows: int, tile: Tile) -> list[Launch]:
        """A launch for each copy of the weight; all share input and output."""
        weight, layout = self.weight, self.weight.layout
        take = self._workspace.take
        x = take("x", num_rows, weight.cols, weight.stored).normal_()
        out = take("out", num_rows, weight.rows // (1 + weight.is_gated), weight.activations)
        quantised = None
        if layout.rows_in_int8:
            width = layout.padded_cols(weight.cols)
            codes = take("codes", num_rows, width, torch.int8).random_(-127, 128)
            quantised = codes, take("scales", num_rows, 1)[:, 0]
        return [
            linear(
                out,
                x,
                matrix,
                gate=weight.is_gated,
                activation="silu" if weight.is_gated else "",
                quantised=quantised,
                activations=weight.activations,
                workspace=self._workspace,
                tile=tile,
            )
            for matrix in self._weights
        ]


def _runs(launch: Launch) -> bool:
    """Whether a kernel compiles and fits on the GPU."""
    try:
        launch()
    except Exception:
        return False
    return True
