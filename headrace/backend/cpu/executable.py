"""The executable of the CPU backend: a native plan that runs a step in one call without the GIL."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend import HostBlocks, KvBlocks, expert_table
from headrace.backend.cpu.lowering import Lowering, ProcessGroup
from headrace.backend.cpu.packing import column_order, copy_bytes, named_in_errors, packed_bytes
from headrace.backend.variants import GatheredRows, result_of, run_parts, with_adapter
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import Activations, KvConfig
from headrace.errors import FormatError, RequestError, UnsupportedModelError
from headrace.logit_ops import Done, LogitOp, LogitOpResult
from headrace.program.adapter import (
    Adapter,
    LowRank,
    low_rank_part,
    own_name,
    own_weights,
    with_own_weights,
)
from headrace.program.fuse import LINEAR_OPS, fuse
from headrace.program.op import Op, Value, Weight
from headrace.program.ops import Glu, GluLinear, Linear
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.quant.kv import BLOCK_SIZE
from headrace.sampling.host import run_logit_ops, tokens_of

Floats = NDArray[np.float32]
Lower = Callable[[Program, Mapping[str, StoredTensor]], Program]
_NO_WEIGHTS: Mapping[str, int] = MappingProxyType({})


def lower(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The program in fused ops if column orders agree, with the bytes of packed weights.

    Raises UnsupportedModelError if an op that is not linear uses a column order.
    """
    reordered = {
        weight.name
        for op in program.ops
        for weight in op.matrices()
        if weights[weight.name].column_order is not None
    }
    for op in program.ops:
        for weight in () if isinstance(op, Linear) else op.matrices():
            if weight.name in reordered:
                raise UnsupportedModelError(
                    f"tensor {weight.name}: groups of columns in another order (act order) are "
                    "supported in linear ops only"
                )

    # The inputs of reordered matrices are packed in that order, from float32.
    inputs = {
        op.x.id for op in program.ops if isinstance(op, Linear) and op.weight.name in reordered
    }
    program = _whole_without_copies(program, weights)
    fused = fuse(program, unpacked=inputs)
    orders = (
        {column_order(weights[weight.name]) for weight in op.matrices()}
        for op in fused.ops
        if isinstance(op, LINEAR_OPS)
    )
    can_fuse = all(len(orders_of_op) == 1 for orders_of_op in orders)
    return lower_unfused(fused if can_fuse else program, weights)


def _whole_without_copies(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The program with the whole of matrices that cannot be read in part.

    So are the others with the same input: one fused op then reads them all.
    """

    def is_whole(linear: Op | None) -> bool:
        if not isinstance(linear, Linear):
            return False
        with named_in_errors(linear.weight.name):
            return not copy_bytes(weights[linear.weight.name], by_rows=True)

    if not any(op.copies() for op in program.ops):
        return program
    writers = {out.id: op for op in program.ops if (out := op.output())}
    whole = {op.x.id for op in program.ops if isinstance(op, Linear) and is_whole(op)}

    def marked(op: Op) -> Op:
        if isinstance(op, Linear) and op.x.id in whole:
            return replace(op, density=1.0)
        if isinstance(op, Glu) and is_whole(writers.get(op.up.id)):
            return replace(op, density=1.0)
        return op

    return replace(program, ops=tuple(marked(op) for op in program.ops))


def lower_unfused(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The program in its own ops, with the bytes of packed weights. Reads no weight.

    Raises UnsupportedModelError for a format without a kernel.
    """
    by_rows = {op.up.name for op in program.ops if isinstance(op, GluLinear)}
    by_tiles = {op.gate.name for op in program.ops if isinstance(op, GluLinear)}
    copied = {weight.name for op in program.ops for weight in op.copies()}

    def packed(weight: Weight) -> Weight:
        tensor, name = weights[weight.name], weight.name
        with named_in_errors(name):
            nbytes = packed_bytes(tensor)
            if name not in copied:
                return replace(weight, nbytes=nbytes)
            by_row = name in by_rows
            copy = nbytes if name in by_tiles else copy_bytes(tensor, by_rows=by_row)
            return replace(weight, nbytes=nbytes, copy_nbytes=copy)

    matrices = {weight.name: packed(weight) for op in program.ops for weight in op.matrices()}
    vectors = {
        weight.name: replace(weight, nbytes=_native.vector_bytes(weight.cols))
        for op in program.ops
        for weight in op.vectors()
    }
    return program.with_weights(matrices | vectors)


def compile(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int,
    activations: Activations = "int8",
) -> "CpuExecutable":
    """Compile for this processor, or for HEADRACE_ISA."""
    return _compile(program, weights, kv, threads, activations)


def _compile(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int | _native.Pool,
    activations: Activations,
    lender: "CpuExecutable | None" = None,
) -> "CpuExecutable":
    if kv.block_size != BLOCK_SIZE:
        raise RequestError(
            f"block_size {kv.block_size} is not supported on cpu; choose {BLOCK_SIZE}"
        )
    return CpuExecutable(
        program, weights, kv, threads, instructions(), activations=activations, lender=lender
    )


def instructions() -> str:
    """The instruction set in use, on which the bits of results depend."""
    return os.environ.get("HEADRACE_ISA") or _native.isa()


class CpuExecutable:
    """A native plan with its packed weights and KV.

    With `lower_unfused` as `lower`, values in `kept` can be read afterwards.
    """

    max_in_flight = 1

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, StoredTensor],
        kv: KvConfig,
        threads: int | _native.Pool,
        isa: str,
        lower: Lower = lower,
        kept: frozenset[int] = frozenset(),
        activations: Activations = "int8",
        process_group: ProcessGroup | None = None,
        lender: "CpuExecutable | None" = None,
    ) -> None:
        """`threads` may be the pool of an executable that never runs at the same time. It may also
        be the `lender` of packed weights, for the same stored tensors.
        """
        self._lower = lower
        self._kept = kept
        self._activations = activations
        self._process_group = process_group
        self._traced = program
        self.program = lower(program, weights)
        self.kv_groups = program.kv_groups
        try:
            make = cast(Callable[..., _native.Plan], _native.Plan)
            self.plan: _native.Plan = (
                make(lender.plan, own_kv=True) if lender else make(isa, threads)
            )
            if activations == "f32":
                self.plan.use_float_activations()
            for group, num_blocks in zip(self.kv_groups, kv.num_blocks, strict=True):
                self.plan.add_kv_group(
                    len(group.layers),
                    group.layout.num_heads,
                    group.layout.key_dim,
                    group.layout.value_dim,
                    group.window,
                    num_blocks,
                    kv.dtype,
                    group.num_sink_tokens,
                    group.has_key_bounds,
                )
            self._set_key_rounding(kv)
        except ValueError as error:
            raise RequestError(str(error)) from None
        self.pool = self.plan.pool
        self._number = 0  # of the program in the plan
        self._views: dict[tuple[int, int], Floats] = {}
        """Views by buffer and number of rows: making a view takes as long as drawing a token."""
        self._most_rows = 0, 0
        self._results: list[LogitOpResult] = []  # of the last launch
        self._variants: dict[int, _Variant] = {}
        packed, vectors = lender._lent(weights) if lender else ({}, {})
        self._fill_plan(weights, None, packed, vectors)
        if isinstance(threads, int):
            self.plan.start_weights()
        else:
            self.wait_for_weights()  # the threads belong to another plan, too

    def _set_key_rounding(self, kv: KvConfig) -> None:
        roundings = {rounding.layer: rounding for rounding in kv.key_rounding}
        for number, group in enumerate(self.kv_groups):
            for place, layer in enumerate(group.layers):
                if layer not in roundings:
                    continue
                rounding = roundings[layer]
                heads = zip(rounding.centre, rounding.feedback, strict=True)
                for head, (centre, feedback) in enumerate(heads):
                    self.plan.set_key_rounding(
                        number,
                        place,
                        head,
                        np.ascontiguousarray(centre),
                        np.ascontiguousarray(feedback).reshape(-1),
                    )

    def _fill_plan(
        self,
        weights: Mapping[str, StoredTensor],
        earlier: Lowering | None,
        packed: Mapping[str, int] = _NO_WEIGHTS,
        vectors: Mapping[str, int] = _NO_WEIGHTS,
    ) -> None:
        """`earlier` is of an earlier program of the plan; `packed` and `vectors` are the numbers of
        weights that the plan has from another.
        """
        places = {
            layer: (number, i)
            for number, group in enumerate(self.kv_groups)
            for i, layer in enumerate(group.layers)
        }
        self._lowering = Lowering(
            self.plan, self.program, weights, places, earlier, self._kept, self._process_group
        )
        self._lowering.packed |= packed
        self._lowering.vectors |= vectors
        self._lowering.lower()
        self._logits = self._result_buffer(self.program.logits)
        self._hidden = self._result_buffer(self.program.hidden)
        self._pooled = self._result_buffer(self.program.pooled)
        self._taps = self._result_buffer(self.program.taps)

    def _result_buffer(self, value: Value | None) -> int | None:
        return self._lowering.buffers[value.id] if value else None

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "CpuExecutable":
        self.wait_for_weights()
        if kv is not None:
            lent = any(self._lent(weights))
            lender = self if lent else None
            return _compile(program, weights, kv, self.pool, self._activations, lender)
        attached = copy(self)
        weights = {**self._lowering.tensors, **weights}
        attached._traced = program
        attached._variants = {}
        attached.program = self._lower(program, weights)
        attached._number = self.plan.add_program()
        attached._fill_plan(weights, self._lowering)
        attached.wait_for_weights()
        return attached

    def _lent(self, weights: Mapping[str, StoredTensor]) -> tuple[dict[str, int], dict[str, int]]:
        """The numbers of packed matrices, and of vectors, that are the same stored tensors."""
        own = {id(tensor): name for name, tensor in self._lowering.tensors.items()}
        names = {name: own[id(tensor)] for name, tensor in weights.items() if id(tensor) in own}
        packed, vectors = self._lowering.packed, self._lowering.vectors
        return (
            {name: packed[known] for name, known in names.items() if known in packed},
            {name: vectors[known] for name, known in names.items() if known in vectors},
        )

    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        self.wait_for_weights()
        self.plan.start_kv()

    def wait_for_weights(self) -> None:
        """Wait for the thread that packs. Raises FormatError for a file that cannot be read."""
        unreadable = self.plan.wait_for_weights()
        if unreadable >= 0:
            names = {number: name for name, number in self._lowering.packed.items()}
            raise FormatError(
                f"tensor {names[unreadable]}: its bytes cannot be read; the file was cut short "
                "after it was opened, or its disk fails. Copy or download the file again"
            )

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> Done:
        batch = batch._replace(tokens=tokens_of(batch, self._results), token_source=None)
        rows = self.run_variants(batch)
        assert rows.logits is not None, "a stage without logits is not launched"
        self._results = run_logit_ops(ops, rows.logits, rows.pooled, self.pool)
        return Done(result_of(self._results, rows, logits=logits, hidden=hidden))

    def run_variants(self, batch: RaggedBatch) -> GatheredRows:
        """Run each program over its sequences; return the rows of the whole batch, until the next
        run.
        """
        if self._variants and batch.adapters is not None:
            return run_parts(batch, self._variants, self._run_part)
        return self._run_part(None, batch)

    def _run_part(self, variant: "_Variant | None", batch: RaggedBatch) -> GatheredRows:
        executable: CpuExecutable = self
        if variant:
            executable, batch = variant.executable, with_adapter(batch, variant.adapter)
        executable.run(batch, batch.tokens)
        return GatheredRows(
            executable.logits(batch),
            executable.hidden(batch),
            executable.pooled(batch),
            executable.taps(batch),
        )

    def logits(self, batch: RaggedBatch) -> Floats | None:  # [logit rows, vocab]
        """The logits of the last run, until the next run; None in a stage without logits."""
        return None if self._logits is None else self._rows(self._logits, len(batch.logit_rows))

    def hidden(self, batch: RaggedBatch) -> Floats | None:  # [logit rows, dim]
        return None if self._hidden is None else self._rows(self._hidden, len(batch.logit_rows))

    def pooled(self, batch: RaggedBatch) -> Floats | None:  # [pooled rows, dim]
        if self._pooled is None or batch.pooled_rows is None:
            return None
        return self._rows(self._pooled, len(batch.pooled_rows))

    def taps(self, batch: RaggedBatch) -> Floats | None:  # [rows, width]
        return None if self._taps is None else self._rows(self._taps, len(batch.tokens))

    def run(self, batch: RaggedBatch, tokens: Ints) -> None:
        if self._process_group:
            self._process_group.begin(tokens)
        self._free_small_buffers(batch)
        moved = True  # a run that fails may have moved the buffers
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

    def _free_small_buffers(self, batch: RaggedBatch) -> None:
        """Drop the views before buffers grow: they would keep the old buffers until the end."""
        num_pooled = 0 if batch.pooled_rows is None else len(batch.pooled_rows)
        rows, gathered_rows = len(batch.tokens), len(batch.logit_rows) + num_pooled
        if rows > self._most_rows[0] or gathered_rows > self._most_rows[1]:
            self._views.clear()
            self._most_rows = max(rows, self._most_rows[0]), max(gathered_rows, self._most_rows[1])

    def _rows(self, buffer: int, num_rows: int) -> Floats:
        key = buffer, num_rows
        if key not in self._views:
            self._views[key] = self.plan.floats(*key)
        return self._views[key]

    def value(self, value_id: int, num_rows: int) -> Floats:  # [rows, width]
        """The rows of a kept value, until the next launch."""
        return self._rows(self._lowering.buffers[value_id], num_rows)

    def profile(self, batch: RaggedBatch) -> StepTimes:
        self.plan.set_profiling(True)  # also resets the times
        start = time.perf_counter()
        self.run(batch, batch.tokens)
        wall = time.perf_counter() - start
        ops, barriers = self.plan.profile()
        self.plan.set_profiling(False)
        return StepTimes(wall, dict(ops), barriers)

    def expert_loads(self) -> NDArray[np.int64]:
        loads = expert_table(self.plan.expert_loads(self._number))
        for variant in self._variants.values():
            loads = loads + variant.executable.expert_loads()
        return loads

    def add_adapter(self, adapter: Adapter) -> int:
        low_rank = low_rank_part(adapter)
        if len(low_rank) == len(adapter):
            return self._add_low_rank(low_rank)
        own = own_weights(self._traced, adapter, self._lowering.tensors)
        tensors = {own_name(name): tensor for name, tensor in own.items()}
        return self.add_variant(with_own_weights(self._traced, own), tensors, low_rank)

    def add_variant(
        self,
        program: Program,
        own: Mapping[str, StoredTensor],
        low_rank: Mapping[str, LowRank],
    ) -> int:
        """Add an adapter with weights of its `own`, which has this program."""
        variant = self._variant(program, own)
        number = self._add_low_rank({})
        self._variants[number] = _Variant(variant, variant._add_low_rank(low_rank))
        return number

    def _add_low_rank(self, matrices: Mapping[str, LowRank]) -> int:
        return self.plan.add_adapter(
            [(self._lowering.packed[name], *pair) for name, pair in matrices.items()]
        )

    def _variant(self, program: Program, own: Mapping[str, StoredTensor]) -> "CpuExecutable":
        """The program in a plan over the same weights and KV."""
        weights = {**self._lowering.tensors, **own}
        variant = copy(self)
        variant._traced, variant.program = program, self._lower(program, weights)
        variant.plan = cast(Callable[..., _native.Plan], _native.Plan)(self.plan)
        variant._number, variant._views, variant._variants = 0, {}, {}
        variant._fill_plan(weights, None, self._lowering.packed, self._lowering.vectors)
        variant.wait_for_weights()
        return variant

    def remove_adapter(self, number: int) -> None:
        self._variants.pop(number, None)
        self.plan.remove_adapter(number)

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        self.plan.move_slots(
            group, np.ascontiguousarray(source, np.int32), np.ascontiguousarray(target, np.int32)
        )

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        """None: the KV is in the host's memory."""
        return None

    def kv_blocks(self) -> KvBlocks:
        return _KvBlocks(self)

    def close(self) -> None:
        self._variants.clear()  # their plans refer to this plan
        del self.plan, self.pool, self._lowering, self._views, self._results


class _KvBlocks:
    """KV blocks of an executable, whose `close` frees them."""

    def __init__(self, executable: CpuExecutable) -> None:
        self._executable = executable
        self.block_bytes = tuple(executable.plan.block_bytes())

    def read(self, group: int, block: int, to: NDArray[np.uint8]) -> None:
        self._executable.plan.read_block(group, block, to)

    def write(self, group: int, block: int, source: NDArray[np.uint8]) -> None:
        self._executable.plan.write_block(group, block, source)


class _Variant(NamedTuple):
    executable: CpuExecutable
    adapter: int
    """The number of its low-rank matrices in the executable."""
