"""Input of a step: one array of integers, which the host copies to the device in one piece."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.step_attention import StepAttention
from headrace.backend.cuda.step_shape import StepShape
from headrace.batch import Ints, RaggedBatch
from headrace.program.op import RowKind
from headrace.program.trace import Program

_ALIGNMENT = 4  # Parts begin at multiples of 4 integers, 16 bytes


class StepInput:
    """Input of steps of one shape, and its views on the device.

    The fixed parts end at `end`. Sampling tables follow, then block tables and paths.
    Padding rows have token 0 at position 0, no adapter, and the padding slot.
    """

    def __init__(
        self,
        shape: StepShape,
        program: Program,
        stores: Sequence[KvStore],
        last_tokens: torch.Tensor,
    ) -> None:
        self.shape, self.last_tokens = shape, last_tokens
        self.attention = StepAttention(program, stores, shape)
        num_gathered = shape.logit_rows + shape.pooled_rows
        sizes: list[tuple[int, ...]] = [
            (1,),  # number of rows
            (shape.rows,),  # tokens
            (shape.rows,),  # source
            (shape.rows,),  # positions
            (shape.rows,),  # adapters
            (num_gathered,),  # gathered rows
            (num_gathered,),  # their adapters
            *self.attention.sizes,
        ]
        self.end = 0
        self._parts: list[tuple[int, int, tuple[int, ...]]] = []
        for size in sizes:
            end = self.end + prod(size)
            self._parts.append((self.end, end, size))
            self.end = -(-end // _ALIGNMENT) * _ALIGNMENT
        # A row count for kernels that also process padding rows
        self.all_rows = torch.full((1,), np.iinfo(np.int32).max, dtype=torch.int32, device=DEVICE)

    def bind(self, device: torch.Tensor) -> None:
        views = self.views(device)
        (
            self.num_rows,
            self.tokens,
            self.source,
            self.positions,
            self._adapters,
            self.gathered,
            self._gathered_adapters,
        ) = views[:7]
        self.attention.bind(views[7:], device)

    def adapters_of(self, rows: RowKind) -> torch.Tensor:
        # -1 for rows without an adapter
        first = self.shape.logit_rows
        gathered = self._gathered_adapters
        return {
            "step": self._adapters,
            "gathered": gathered,
            "logit": gathered[:first],
            "pooled": gathered[first:],
        }[rows]

    def fill(self, batch: RaggedBatch, views: Sequence[Ints], host: Ints, used: int) -> int:
        """Write a batch, with block tables from `host[used]` on; return their end."""
        (
            num_rows,
            tokens,
            source,
            positions,
            adapters,
            gathered,
            gathered_adapters,
            *attention_views,
        ) = views
        num_rows[0] = len(batch.tokens)
        _pad(tokens, batch.tokens, 0)
        _pad(source, () if batch.token_source is None else batch.token_source, -1)
        _pad(positions, batch.positions, 0)

        # Rows with logits come first, pooled rows second.
        first = self.shape.logit_rows
        _pad(gathered[:first], batch.logit_rows, 0)
        _pad(gathered[first:], () if batch.pooled_rows is None else batch.pooled_rows, 0)

        if self.shape.has_adapters:
            assert batch.adapters is not None
            row_adapters = np.repeat(batch.adapters, np.diff(batch.row_start))
            _pad(adapters, row_adapters, -1)
            _pad(gathered_adapters[:first], row_adapters[batch.logit_rows], -1)
            _pad(
                gathered_adapters[first:],
                () if batch.pooled_rows is None else row_adapters[batch.pooled_rows],
                -1,
            )
        return self.attention.fill(batch, attention_views, host, used)

    def fill_with_padding(self, host: Ints) -> None:
        host[: self.end] = 0
        _, _, source, _, adapters, _, gathered_adapters, *attention_views = self.views(host)
        for part in (source, adapters, gathered_adapters):
            part[:] = -1
        self.attention.fill_with_padding(attention_views)

    def views(self, array: Any) -> list[Any]:
        """The fixed parts of an array or a tensor."""
        return [array[first:last].reshape(size) for first, last, size in self._parts]


def max_ints(batch: RaggedBatch, tables_start: int) -> int:
    """Max integers of a step whose block tables begin at `tables_start`."""
    trees = 0 if batch.ancestors is None else int(np.bitwise_count(batch.ancestors).sum())
    return tables_start + sum(kv.block_table.size + trees for kv in batch.kv)


def _pad(part: Ints, values: Ints | tuple[()], padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding
