"""Minimal native plans that run one kernel: linear ops, and attention over a filled KV cache."""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.executable import BLOCK_SIZE
from headrace.backend.cpu.packing import add_weight
from headrace.batch import Ints, KvRows, RaggedBatch
from headrace.quant.formats import StoredTensor

Floats = NDArray[np.float32]
VOCAB = 64
"""Vocabulary of the plans that fill a KV cache; rows differ only in their embeddings."""
_PASSES = 3
"""Runs of a plan per sample; the median counts."""
_MAX_ERROR = 0.02
"""Max error relative to the largest output: int8 activations cause half a percent, a wrong kernel
far more.
"""
_CHECKED = 256
"""Number of outputs that are compared with NumPy."""


def ragged(
    seqs: Sequence[tuple[int, int]], tables: Ints, vocab: int, logits: bool = True
) -> RaggedBatch:
    """A step with (context, rows) of each sequence and its blocks, [sequences, blocks], and logits
    of each last row.
    """
    context, rows = (np.array(column, np.int32) for column in zip(*seqs, strict=True))
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    seq_of = np.repeat(np.arange(len(rows)), rows)
    positions = (np.arange(start[-1]) - start[seq_of] + context[seq_of]).astype(np.int32)
    slots = (tables[seq_of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).astype(
        np.int32
    )
    tokens = (np.arange(start[-1]) % vocab).astype(np.int32)
    logit_rows = start[1:] - 1 if logits else start[:0]
    tables = np.ascontiguousarray(tables, np.int32)
    seqs = np.arange(len(logit_rows), dtype=np.int32)
    return RaggedBatch(
        tokens, positions, start, context, rows, (KvRows(slots, tables),), None, logit_rows, seqs
    )


def single_rows(num_rows: int, logits: bool = False) -> RaggedBatch:
    """Sequences with one row and no context; row i has token i."""
    return ragged([(0, 1)] * num_rows, np.zeros((num_rows, 1), np.int32), num_rows, logits)


def run(plan: _native.Plan, batch: RaggedBatch) -> None:
    kv = batch.kv if plan.kv_bytes else ()
    plan.run(
        batch.tokens,
        batch.positions,
        batch.row_start,
        batch.context_len,
        batch.scheduled_len,
        kv,
        None,
        batch.logit_rows,
    )


def op_seconds(plan: _native.Plan, batches: Sequence[RaggedBatch]) -> dict[str, float]:
    """Seconds of each kind of op in a run of all batches, including the barrier after it."""
    plan.set_profiling(True)
    for batch in batches:
        run(plan, batch)
    seconds: dict[str, float] = dict(plan.profile()[0])
    plan.set_profiling(False)
    return seconds


def plain_plan(threads: int) -> _native.Plan:
    """A plan without KV."""
    return _native.Plan("", threads)


def embedded(plan: _native.Plan, x: Floats) -> int:
    """A float32 buffer with the rows of x, [rows, width]; token i selects row i."""
    buffer: int = plan.add_buffer(x.shape[1], "step", False)
    plan.embed(buffer, plan.add_weight("F32", *x.shape, x.view(np.uint8).reshape(-1), None))
    return buffer


class LinearPlan:
    """Linear ops `out = x @ weight.T` with one input, and copies of one weight.

    With enough copies no weight is in a cache at its turn, as in a model. `offset`: int8
    activations have an offset, as for queries, keys, values and the head.
    """

    def __init__(
        self,
        stored: StoredTensor,
        threads: int,
        min_bytes: int,
        max_rows: int,
        offset: bool = False,
    ) -> None:
        self.stored = stored
        self.x: Floats = np.random.default_rng(1).standard_normal(
            (max_rows, stored.cols), np.float32
        )
        self.plan = plan = plain_plan(threads)
        loose = embedded(plan, self.x)
        packed, self._out = (
            plan.add_buffer(stored.cols, "step", True),
            plan.add_buffer(stored.rows, "step", False),
        )
        plan.pack(packed, loose)
        before, self.weight_bytes, self.copies = plan.weight_bytes, 0, 0
        while self.copies * self.weight_bytes < min_bytes:
            plan.linear(self._out, packed, add_weight(plan, stored), -1, -1, offset)
            self.copies += 1
            self.weight_bytes = (plan.weight_bytes - before) // self.copies
        self.refuse_wrong_results()

    def seconds(self, num_rows: int) -> float:
        """Seconds of one op."""
        batch = [single_rows(num_rows)]
        return (
            statistics.median(op_seconds(self.plan, batch)["linear"] for _ in range(_PASSES))
            / self.copies
        )

    @property
    def bits(self) -> float:
        """Bits that the kernel reads per weight, including scales; a file may have a few percent
        less.
        """
        return 8 * self.weight_bytes / (self.stored.rows * self.stored.cols)

    def refuse_wrong_results(self) -> None:
        """Compare some outputs of the last op with NumPy, since the time of a wrong kernel is
        meaningless.
        """
        num_rows = min(5, len(self.x))
        run(self.plan, single_rows(num_rows))
        columns = np.linspace(0, self.stored.rows - 1, _CHECKED).astype(int)
        got = self.plan.floats(self._out, num_rows)[:, columns]
        want = self.x[:num_rows] @ self.stored.dequantise_rows(columns).T
        self.error = float(np.abs(got - want).max() / np.abs(want).max())
        """Max difference from NumPy in float32, relative to the largest output."""
        if not self.error <= _MAX_ERROR:
            what = f"{self.stored.format.name} {self.stored.rows} x {self.stored.cols}"
            sys.exit(
                f"the linear kernel for {what} is wrong, relative error {self.error:.3f}: "
                "see tests/backend/test_cpu_linear.py"
            )


class AttentionPlan:
    """One attention layer over a KV cache with random keys and values."""

    def __init__(
        self, threads: int, heads: int, kv_heads: int, head_dim: int, num_blocks: int, kv_dtype: str
    ) -> None:
        rng = np.random.default_rng(2)
        self.plan = plan = _native.Plan("", threads)
        plan.add_kv_group(1, kv_heads, head_dim, head_dim, 0, num_blocks, kv_dtype)
        x = embedded(plan, rng.standard_normal((VOCAB, BLOCK_SIZE), np.float32))
        packed = plan.add_buffer(BLOCK_SIZE, "step", True)
        plan.pack(packed, x)
        angles = plan.rope_angles([], 1.0, head_dim)  # rotates nothing
        q, out = (
            plan.add_buffer(heads * head_dim, "step", False),
            plan.add_buffer(heads * head_dim, "step", False),
        )
        weights = [self._weight(rng, h * head_dim) for h in (heads, kv_heads, kv_heads)]
        plan.qkv_rope_write(q, packed, angles, weights, [-1, -1, -1], (0, 0))
        plan.attention(out, q, (0, 0), heads, head_dim, head_dim**-0.5)
        for first in range(0, num_blocks, VOCAB):
            blocks = np.arange(first, min(first + VOCAB, num_blocks), dtype=np.int32)
            run(plan, ragged([(0, BLOCK_SIZE)] * len(blocks), blocks[:, None], VOCAB, False))

    def _weight(self, rng: np.random.Generator, rows: int) -> Any:
        values = rng.standard_normal((rows, BLOCK_SIZE), np.float32) * np.float32(BLOCK_SIZE**-0.5)
        return self.plan.add_weight(
            "F32", rows, BLOCK_SIZE, values.view(np.uint8).reshape(-1), None
        )

    def seconds(self, batches: Sequence[RaggedBatch]) -> float:
        """Seconds of attention in all batches, including merging partial results."""
        return op_seconds(self.plan, batches)["attention"]
