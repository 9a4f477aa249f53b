"""Attention in steps of one shape: its work, and the launches that write and read KV."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from headrace.backend.cuda.architecture import architecture
from headrace.backend.cuda.attention_tiles import Tiles, tiles_for, work_of
from headrace.backend.cuda.attention_work import (
    FIELDS,
    ROW_FIELDS,
    WorkArrays,
    build_work,
)
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.attention import AttentionWork, Scratch, attention, summed_dim
from headrace.backend.cuda.kernels.attention_bias import KeyBias
from headrace.backend.cuda.kernels.kv_write import kv_write, rope_write
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.step_memory import num_partials
from headrace.backend.cuda.step_shape import StepShape
from headrace.backend.cuda.workspace import Workspace
from headrace.batch import Ints, RaggedBatch
from headrace.program import ops
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor


class GroupInts(NamedTuple):
    """Integers of a group of layers in one step, on the host or on the device."""

    slots: Ints | torch.Tensor  # [rows]
    items: Ints | torch.Tensor  # [partials, FIELDS]
    num_items: Ints | torch.Tensor  # [1]
    rows: Ints | torch.Tensor  # [rows, ROW_FIELDS]


class StepAttention:
    """Attention of a program in steps of one shape."""

    def __init__(self, program: Program, stores: Sequence[KvStore], shape: StepShape) -> None:
        self._stores, self._rows, self._has_trees = stores, shape.rows, shape.has_trees
        self._group = {
            layer: number for number, store in enumerate(stores) for layer in store.group.layers
        }
        self._tiles = [step_tiles(store.group, store.format, shape) for store in stores]
        by_group = {
            self._group[op.layer]: op for op in program.ops if isinstance(op, ops.Attention)
        }
        self._work = {number: work_of(op, self._tiles[number]) for number, op in by_group.items()}
        self.partials = [num_partials(shape, tiles) for tiles in self._tiles]
        self._views: list[GroupInts] = []
        self._all: torch.Tensor | None = None

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Shapes of the arrays of `GroupInts`, group by group."""
        # The number of items is padded to 4 integers, which aligns the rows after it.
        return [
            size
            for partials in self.partials
            for size in ((self._rows,), (partials, FIELDS), (4,), (self._rows, ROW_FIELDS))
        ]

    def bind(self, views: Sequence[torch.Tensor], array: torch.Tensor) -> None:
        """Take the device's views, in the order of `sizes`, and its whole array."""
        self._views, self._all = _grouped(views), array

    def fill(self, batch: RaggedBatch, views: Sequence[Ints], host: Ints, used: int) -> int:
        """Write the work of a batch, with block tables and paths from `host[used]` on;
        return their end.
        """
        for number, (store, kv, ints) in enumerate(
            zip(self._stores, batch.kv, _grouped(views), strict=True)
        ):
            num_rows, table = len(kv.slots), kv.block_table
            ints.slots[:num_rows] = kv.slots
            ints.slots[num_rows:] = store.padding_slot
            if number not in self._work:
                continue
            first, used = used, used + table.size
            host[first:used] = table.reshape(-1)
            arrays = WorkArrays(ints.items, ints.num_items[:1], ints.rows, host[used:])
            used += build_work(batch, self._work[number], first, table.shape[1], arrays, used).paths
        return used

    def fill_with_padding(self, views: Sequence[Ints]) -> None:
        """Make all rows of zeroed views padding rows, without work."""
        for store, ints in zip(self._stores, _grouped(views), strict=True):
            ints.slots[:] = store.padding_slot

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor | None) -> list[Launch]:
        number = self._group[layer]
        return [kv_write(k, v, self._views[number].slots, self._stores[number], layer)]

    def rope_write(
        self, layer: int, q: torch.Tensor, qkv: torch.Tensor, angles: torch.Tensor
    ) -> list[Launch]:
        """Rotate the queries and keys of `qkv`; write queries to `q`, keys and values to
        the store.
        """
        number = self._group[layer]
        return [rope_write(q, qkv, angles, self._views[number].slots, self._stores[number], layer)]

    def attend(
        self,
        op: ops.Attention,
        out: torch.Tensor,
        q: torch.Tensor,
        sinks: torch.Tensor | None,
        key_bias: StoredTensor | None,
        workspace: Workspace,
    ) -> list[Launch]:
        number = self._group[op.layer]
        store, view, partials = self._stores[number], self._views[number], self.partials[number]
        assert self._all is not None
        work = AttentionWork(
            items=view.items,
            num_items=view.num_items,
            rows=view.rows,
            table=self._all,
            paths=self._all,
        )
        sums = workspace.take("partial sums", partials, op.num_heads * summed_dim(op, store))
        weights = workspace.take("partial weights", partials, 2 * op.num_heads)
        arrivals = workspace.take("attention arrivals", len(q), op.num_heads, torch.int32)
        queries = q
        if store.uses_hadamard:
            queries = workspace.take("hadamard queries", len(q), q.shape[1])
        slopes: torch.Tensor | None = None
        if op.slopes:
            slopes = workspace.once(
                f"slopes {op.slopes}",
                lambda: torch.tensor(op.slopes, dtype=torch.float32, device=DEVICE),
            )
        tiles, bias = self._tiles[number], None
        if key_bias:
            bias = workspace.once(
                f"key bias {key_bias.name} {tiles.split}",
                lambda: KeyBias.of(op, key_bias.dequantise(), tiles.split),
            )
        return attention(
            op,
            q,
            out,
            store,
            work,
            Scratch(sums, weights, arrivals, queries),
            tiles,
            slopes,
            sinks,
            bias,
            self._has_trees,
        )


def _grouped(views: Sequence[Ints] | Sequence[torch.Tensor]) -> list[GroupInts]:
    return [GroupInts(*views[i : i + 4]) for i in range(0, len(views), 4)]


def step_tiles(group: KvGroup, dtype: str, shape: StepShape) -> Tiles:
    """Tiles of a step: small ones if all rows have logits, as in decoding and draft trees."""
    if is_interpreting():  # small, as they take time by the number of programs and of tiles
        narrow = Tiles(
            rows=16, keys=32, split=64, programs=1, num_warps=4, num_stages=1, min_units=4
        )
        return narrow._replace(rows=32, narrow=narrow) if shape.is_prefill else narrow
    return tiles_for(group, dtype, architecture(), shape.is_prefill)
