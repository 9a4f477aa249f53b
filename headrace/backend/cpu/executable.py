"""The CPU backend: lowers a program to a native plan. A step is one native call with the GIL
released.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend import HostBlocks, expert_table
from headrace.backend.cpu.lowering import Links, Lowering
from headrace.backend.cpu.packing import column_order, named_in_errors, packed_bytes
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import Activations, KvConfig
from headrace.errors import RequestError, UnsupportedModelError
from headrace.logit_ops import Done, LogitOp, LogitOpResult, StepResult
from headrace.program.adapter import Adapter
from headrace.program.fuse import LINEAR_OPS, fuse
from headrace.program.op import Weight
from headrace.program.ops import Linear
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.quant.kv import BLOCK_SIZE
from headrace.sampling.host import run_logit_ops, tokens_of


def lower(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The program in fused ops, with the bytes of packed weights.

    Where the matrices of one fused op read their columns in different orders it stays op by op.
    Raises UnsupportedModelError for a matrix that has such an order and is read by anything but a
    linear op.
    """
    ordered = {
        w.name
        for op in program.ops
        for w in op.matrices()
        if weights[w.name].column_order is not None
    }
    for op in program.ops:
        if (
            found := []
            if isinstance(op, Linear)
            else [w.name for w in op.matrices() if w.name in ordered]
        ):
            raise UnsupportedModelError(
                f"tensor {found[0]}: groups of columns in another order (act order) are "
                "read by linear ops alone"
            )
    fused = fuse(
        program,
        {op.x.id for op in program.ops if isinstance(op, Linear) and op.weight.name in ordered},
    )
    alike = all(
        len({column_order(weights[w.name]) for w in op.matrices()}) == 1
        for op in fused.ops
        if isinstance(op, LINEAR_OPS)
    )
    return sized(fused if alike else program, weights)


def sized(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The same program with the bytes of its weights once they are packed; nothing of them is read.

    Raises UnsupportedModelError, which names the tensor, for a format that no kernel reads.
    """

    def packed(weight: Weight) -> Weight:
        with named_in_errors(weight.name):
            return replace(weight, nbytes=packed_bytes(weights[weight.name]))

    matrices = {w.name: packed(w) for op in program.ops for w in op.matrices()}
    vectors = {
        w.name: replace(w, nbytes=_native.vector_bytes(w.cols))
        for op in program.ops
        for w in op.vectors()
    }
    return program.with_weights(matrices | vectors)


def compile(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int,
    activations: Activations = "int8",
) -> "CpuExecutable":
    """Compile for this processor, with one thread at least; HEADRACE_ISA can lower the instruction
    set.
    """
    return _compile(program, weights, kv, threads, activations)


def _compile(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int | _native.Pool,
    activations: Activations,
) -> "CpuExecutable":
    if kv.block_size != BLOCK_SIZE:
        raise RequestError(
            f"the cpu backend stores KV in blocks of {BLOCK_SIZE} tokens, not {kv.block_size}"
        )
    return CpuExecutable(
        program, weights, kv, threads, os.environ.get("HEADRACE_ISA", ""), activations=activations
    )


class CpuExecutable:
    """A native plan with its weights (packed once) and KV cache. A launch runs at once.

    `lower` makes of a program what runs; with `sized` that is the program op by op, which gives the
    same bits in more time. Then values that are `kept`, by id, can be read after a launch.
    """

    max_in_flight = 1

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, StoredTensor],
        kv: KvConfig,
        threads: int | _native.Pool,
        isa: str,
        lower: Callable[[Program, Mapping[str, StoredTensor]], Program] = lower,
        kept: frozenset[int] = frozenset(),
        activations: Activations = "int8",
        links: Links | None = None,
    ) -> None:
        self._lower, self._kept, self._activations, self._links = lower, kept, activations, links
        self.program = lower(program, weights)
        self.kv_groups = program.kv_groups
        try:
            self.plan = _native.Plan(isa, threads)
            if activations == "f32":
                self.plan.use_float_activations()
            for group, num_blocks in zip(self.kv_groups, kv.num_blocks, strict=True):
                layout = group.layout
                sizes = layout.num_heads, layout.key_dim, layout.value_dim
                self.plan.add_kv_group(
                    len(group.layers),
                    *sizes,
                    group.window,
                    num_blocks,
                    kv.dtype,
                    group.num_sink_tokens,
                )
        except ValueError as error:
            raise RequestError(str(error)) from None
        self.pool = self.plan.pool
        self._number = 0
        self._views: dict[tuple[int, int], NDArray[np.float32]] = {}
        """Views of the plan's buffers, by buffer and number of rows, until they move: to make one
        takes as long as to draw a token.
        """
        self._values: list[LogitOpResult] = []
        """Results of the logit ops of the last launch."""
        self._fill_plan(weights, None)

    def _fill_plan(self, weights: Mapping[str, StoredTensor], earlier: "Lowering | None") -> None:
        places = {
            layer: (number, i)
            for number, group in enumerate(self.kv_groups)
            for i, layer in enumerate(group.layers)
        }
        self._lowering = Lowering(
            self.plan, self.program, weights, places, earlier, self._kept, self._links
        )
        self._lowering.lower()
        self._logits, self._hidden, self._pooled = (
            self._lowering.buffers[value.id] if value else None
            for value in (self.program.logits, self.program.hidden, self.program.pooled)
        )

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "CpuExecutable":
        if kv is not None:
            return _compile(program, weights, kv, self.pool, self._activations)
        other = copy(self)
        weights = {**self._lowering.tensors, **weights}
        other.program = self._lower(program, weights)
        other._number = self.plan.add_program()
        other._fill_plan(weights, self._lowering)
        return other

    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        """Nothing is made ahead."""

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> Done:
        self.run(batch, tokens_of(batch, self._values))
        rows = self.logits(batch)
        assert rows is not None, "a stage without logits is not launched"
        self._values = run_logit_ops(ops, rows, self.pooled(batch), self.pool)
        return Done(
            StepResult(
                self._values, rows if logits else None, self.hidden(batch) if hidden else None
            )
        )

    def logits(self, batch: RaggedBatch) -> NDArray[np.float32] | None:  # [logit rows, vocab]
        """The logits of the last run, until the next; None in a stage that has none."""
        return None if self._logits is None else self._rows(self._logits, len(batch.logit_rows))

    def hidden(self, batch: RaggedBatch) -> NDArray[np.float32] | None:  # [logit rows, dim]
        """The rows before the head, of a program that keeps them, in the last run."""
        return None if self._hidden is None else self._rows(self._hidden, len(batch.logit_rows))

    def pooled(self, batch: RaggedBatch) -> NDArray[np.float32] | None:  # [pooled rows, dim]
        """The pooled rows of the last run, of a program and a batch that have them."""
        pooled = batch.pooled_rows
        return (
            None
            if pooled is None or self._pooled is None
            else self._rows(self._pooled, len(pooled))
        )

    def run(self, batch: RaggedBatch, tokens: Ints) -> None:
        """One forward over the rows of a batch, with these tokens; what it gives back is read
        afterwards.
        """
        if self._links:
            self._links.begin(tokens)
        moved = True  # as it may be where a run fails on its way
        try:
            moved = self.plan.run(
                tokens,
                batch.positions,
                batch.row_start,
                batch.context_len,
                batch.scheduled_len,
                batch.kv,
                batch.ancestors,
                batch.logit_rows,
                batch.pooled_rows,
                batch.inputs,
                self._number,
                batch.adapters,
            )
        finally:
            if moved:
                self._views.clear()

    def _rows(self, buffer: int, num_rows: int) -> NDArray[np.float32]:
        key = buffer, num_rows
        if key not in self._views:
            self._views[key] = self.plan.floats(*key)
        return self._views[key]

    def value(self, number: int, num_rows: int) -> NDArray[np.float32]:  # [rows, width]
        """The rows of a kept value in the last launch, until the next."""
        return self._rows(self._lowering.buffers[number], num_rows)

    def profile(self, batch: RaggedBatch) -> StepTimes:
        self.plan.set_profiling(True)  # from zero
        started = time.perf_counter()
        self.run(batch, batch.tokens)
        wall = time.perf_counter() - started
        ops, barriers = self.plan.profile()
        self.plan.set_profiling(False)
        return StepTimes(wall, dict(ops), barriers)

    def expert_loads(self) -> NDArray[np.int64]:
        return expert_table(self.plan.expert_loads(self._number))

    def add_adapter(self, adapter: Adapter) -> int:
        return self.plan.add_adapter(
            [(self._lowering.packed[name], *matrices) for name, matrices in adapter.items()]
        )

    def remove_adapter(self, number: int) -> None:
        self.plan.remove_adapter(number)

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        self.plan.move_slots(
            group, np.ascontiguousarray(source, np.int32), np.ascontiguousarray(target, np.int32)
        )

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        """None: its KV is in the host's memory."""
        return None

    def close(self) -> None:
        del self.plan, self.pool, self._lowering, self._views, self._values
