"""The CPU backend: lowers a program to a native plan. A step is one native call with the GIL released."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import KvConfig
from headrace.errors import RequestError, UnsupportedModelError
from headrace.logit_ops import Done, LogitOp, LogitOpResult, StepResult
from headrace.program import ops
from headrace.program.fuse import LINEAR_OPS, fuse
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.kv import BLOCK_SIZE
from headrace.sampling.host import run_logit_ops, with_tokens

GROUP = 32
"""Columns that share a scale in packed activations."""


def compile(program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig, threads: int) -> "CpuExecutable":
    """Compile for this processor, with one thread at least; HEADRACE_ISA can lower the instruction set."""
    return _compile(program, weights, kv, threads)


def _compile(program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig, threads: int | _native.Pool) -> "CpuExecutable":
    if kv.block_size != BLOCK_SIZE:
        raise RequestError(f"the cpu backend stores KV in blocks of {BLOCK_SIZE} tokens, not {kv.block_size}")
    return CpuExecutable(program, weights, kv, threads, os.environ.get("HEADRACE_ISA", ""))


class CpuExecutable:
    """A native plan with its weights (packed once) and KV cache. A launch runs at once."""

    max_in_flight = 1

    def __init__(self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig, threads: int | _native.Pool, isa: str) -> None:
        self.program = fuse(program)
        self.kv_groups = program.kv_groups
        try:
            self.plan = _native.Plan(isa, threads)
            for group, num_blocks in zip(self.kv_groups, kv.num_blocks, strict=True):
                heads, size = group.layout.num_heads, _head_size(group)
                self.plan.add_kv_group(len(group.layers), heads, size, group.window, num_blocks, kv.dtype)
        except ValueError as error:
            raise RequestError(str(error)) from None
        self._number = 0
        self._values: list[LogitOpResult] = []
        """Results of the logit ops of the last launch."""
        self._lower(weights, None)

    def _lower(self, weights: Mapping[str, StoredTensor], earlier: "_Lowering | None") -> None:
        places = {layer: (number, i) for number, group in enumerate(self.kv_groups) for i, layer in enumerate(group.layers)}
        self._lowering = _Lowering(self.plan, self.program, weights, places, earlier)
        self._lowering.lower()
        self._vocab = next((op.weight.rows for op in self.program.ops if isinstance(op, ops.Embed)), 1)
        self._logits = self._lowering.buffers[self.program.logits.id]
        self._hidden = self._lowering.buffers[self.program.hidden.id] if self.program.hidden else None

    def attach(self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None) -> "CpuExecutable":
        if kv is not None:
            return _compile(program, weights, kv, self.plan.pool)
        other = copy(self)
        other.program = fuse(program)
        other._number = self.plan.add_program()
        other._lower(weights, self._lowering)
        return other

    def launch(self, batch: RaggedBatch, ops: Sequence[LogitOp] = (), *, logits: bool = False, hidden: bool = False) -> Done:
        self._run(with_tokens(batch, self._values))
        rows = self._rows(self._logits, batch)
        self._values = run_logit_ops(ops, rows, self.plan.pool)
        kept = self._rows(self._hidden, batch) if hidden and self._hidden is not None else None
        return Done(StepResult(self._values, rows if logits else None, kept))

    def _run(self, batch: RaggedBatch) -> None:
        self.plan.run(
            self._vocab,
            batch.tokens,
            batch.positions,
            batch.row_start,
            batch.context_len,
            batch.scheduled_len,
            batch.kv,
            batch.ancestors,
            batch.logit_rows,
            batch.inputs,
            self._number,
        )

    def _rows(self, buffer: int, batch: RaggedBatch) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self.plan.floats(buffer, len(batch.logit_rows))
        return rows

    def profile(self, batch: RaggedBatch) -> StepTimes:
        self.plan.set_profiling(True)  # from zero
        started = time.perf_counter()
        self._run(batch)
        wall = time.perf_counter() - started
        ops, barriers = self.plan.profile()
        self.plan.set_profiling(False)
        return StepTimes(wall, dict(ops), barriers)

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        self.plan.move_slots(group, np.ascontiguousarray(source, np.int32), np.ascontiguousarray(target, np.int32))

    def close(self) -> None:
        del self.plan


def _head_size(group: KvGroup) -> int:
    """Numbers of a key, and of a value. Raises UnsupportedModelError where they differ."""
    layout = group.layout
    if layout.key_dim != layout.value_dim:
        raise UnsupportedModelError(f"the cpu backend keeps no keys of {layout.key_dim} beside values of {layout.value_dim} numbers")
    return layout.key_dim


_Readers = frozenset[tuple[str, bool]]
_Shape = tuple[int, str, bool, _Readers]


class _Lowering:
    """Turns ops into native ops, values into buffers that are reused once their value is dead, and tensors into packed weights."""

    def __init__(
        self,
        plan: _native.Plan,
        program: Program,
        weights: Mapping[str, StoredTensor],
        places: Mapping[int, tuple[int, int]],
        earlier: "_Lowering | None",
    ) -> None:
        self.plan = plan
        self.program = program
        self.places = places  # (group, place in it) of each layer that keeps something
        self.tensors: Mapping[str, StoredTensor] = {**earlier.tensors, **weights} if earlier else weights
        self.packed: dict[str, int] = earlier.packed if earlier else {}
        self.pairs: dict[tuple[str, str], tuple[int, int]] = earlier.pairs if earlier else {}
        self.vectors: dict[str, int] = earlier.vectors if earlier else {}
        self.buffers: dict[int, int] = {}  # of values that are alive
        self.free: dict[_Shape, list[int]] = {}
        if earlier:  # not the packed ones: they would be packed in the forms that either program reads
            self.free = {shape: list(buffers) for shape, buffers in earlier.free.items() if not shape[2]}
        self.readers = _readers(program, self.tensors)
        self.angles = -1  # a buffer of a shape of its own, never reused

    def lower(self) -> None:
        """Fills the plan; in the end `buffers` has what the program gives back."""
        last_use = self.program.last_use()
        for index, op in enumerate(self.program.ops):
            if type(op) not in _LOWER:
                raise UnsupportedModelError(f"the cpu backend has no kernel for {type(op).__name__}")
            _LOWER[type(op)](self, op)
            for value in {v.id: v for v in op.inputs()}.values():
                if last_use[value.id] == index:
                    self.release(value)

    def buffer(self, value: ops.Value) -> int:
        """The buffer of a value, a free one of the same shape if it has none yet."""
        if value.id not in self.buffers:
            free = self.free.get(self.shape(value))
            self.buffers[value.id] = free.pop() if free else self.plan.add_buffer(value.width, value.rows == "logit", value.packed)
        return self.buffers[value.id]

    def shape(self, value: ops.Value) -> _Shape:
        """What two values must share to share a buffer: with the same readers it is packed in the forms that they read, and no others."""
        return value.width, value.rows, value.packed, self.readers.get(value.id, frozenset()) if value.packed else frozenset()

    def release(self, value: ops.Value) -> None:
        for v in (value, _packed_copy(value)):
            if v.id in self.buffers and self.buffers[v.id] != self.angles:
                self.free.setdefault(self.shape(v), []).append(self.buffers.pop(v.id))

    def write(self, out: ops.Value, lower: Callable[[int], None], packs_groups: bool = False) -> None:
        """Lowers an op that writes float32; where the value is to be packed, packs the result.

        `packs_groups`: the op can itself pack a row piece by piece, which does where the scales are those of groups.
        """
        whole_rows = any("row_scales" in FORMATS[name].parts for name, _ in self.readers.get(out.id, ()))
        if not out.packed or (packs_groups and not whole_rows):
            return lower(self.buffer(out))
        loose = replace(out, id=-1, packed=False)
        lower(self.buffer(loose))
        self.plan.pack(self.buffer(out), self.buffer(loose))
        self.release(loose)
        return None

    def packed_input(self, x: ops.Value) -> int:
        """The packed form of a linear op's input; a value that others read as float32 too is packed here."""
        if x.packed:
            return self.buffer(x)
        packed = _packed_copy(x)
        if packed.id not in self.buffers:
            self.plan.pack(self.buffer(packed), self.buffer(x))
        return self.buffers[packed.id]

    def weight(self, weight: ops.Weight) -> int:
        if weight.name not in self.packed:
            t = self.tensors[weight.name]
            with _named(t):
                parts = t.parts["codes"], t.row_order, t.parts.get("row_scales")
                self.packed[weight.name] = self.plan.add_weight(t.format.name, t.rows, t.cols, *parts)
            t.release()
        return self.packed[weight.name]

    def weight_pair(self, a: ops.Weight, b: ops.Weight) -> tuple[int, int]:
        """Two matrices of one shape, which are read in turns."""
        names = (a.name, b.name)
        if names not in self.pairs:
            s, t = self.tensors[a.name], self.tensors[b.name]
            assert s.row_order is None and t.row_order is None, "a pair is packed as it is stored"
            with _named(s):
                self.pairs[names] = self.plan.add_weight_pair(
                    *(s.format.name, s.parts["codes"], s.parts.get("row_scales")),
                    *(t.format.name, t.parts["codes"], t.parts.get("row_scales")),
                    *(s.rows, s.cols),
                )
            s.release()
            t.release()
        return self.pairs[names]

    def vector(self, weight: ops.Weight | None) -> int:
        if weight is None:
            return -1
        if weight.name not in self.vectors:
            self.vectors[weight.name] = self.plan.add_vector(self.tensors[weight.name].dequantise().reshape(-1))
        return self.vectors[weight.name]


def _packed_copy(value: ops.Value) -> ops.Value:
    return replace(value, id=-2 - value.id, packed=True)


def _readers(program: Program, tensors: Mapping[str, StoredTensor]) -> dict[int, _Readers]:
    """By id, for values and their packed copies: the weights that they are multiplied with, and whether with offset."""
    readers: dict[int, _Readers] = {}
    for op in program.ops:
        if isinstance(op, LINEAR_OPS):
            matrices = [w for field, w in vars(op).items() if isinstance(w, ops.Weight) and not field.endswith("bias")]
            read = frozenset((tensors[w.name].format.name, _reads_offset(op, program)) for w in matrices)
            for value in (op.x, _packed_copy(op.x)):
                readers[value.id] = readers.get(value.id, frozenset()) | read
    return readers


def _reads_offset(op: ops.Op, program: Program) -> bool:
    """Whether an op reads int8 activations around the middle of their range.

    Queries, keys, values and logits are worth the finer activations: together they make half of what int8 activations cost in
    KL, for a sixth of a prefill's arithmetic.
    """
    return isinstance(op, ops.QkvRopeWrite) or op.output() == program.logits


@contextmanager
def _named(tensor: StoredTensor) -> Iterator[None]:
    """Raises UnsupportedModelError, which names the tensor, for a weight that the kernels refuse."""
    try:
        yield
    except ValueError as error:
        raise UnsupportedModelError(f"tensor {tensor.name}: {error}") from None


def _embed(lo: _Lowering, op: ops.Embed) -> None:
    lo.write(op.out, lambda out: lo.plan.embed(out, lo.weight(op.weight)))


def _input(lo: _Lowering, op: ops.Input) -> None:
    lo.write(op.out, lambda out: lo.plan.input(out))


def _rope_angles(lo: _Lowering, op: ops.RopeAngles) -> None:
    # The native rows hold the angles of a whole head, and 16 more (csrc/ops_rows.cpp).
    head_dim = next(reader.head_dim for reader in lo.program.ops if isinstance(reader, ops.QkvRopeWrite) and reader.angles == op.out)
    lo.buffers[op.out.id] = lo.angles = lo.plan.add_buffer(2 * (head_dim + 16), False, False)
    lo.plan.rope_angles(lo.angles, list(op.inverse_frequencies), op.scale, head_dim)


def _norm(lo: _Lowering, op: ops.Norm) -> None:
    lo.plan.norm(lo.buffer(op.out), lo.buffer(op.x), lo.vector(op.weight), op.eps)


def _linear(lo: _Lowering, op: ops.Linear) -> None:
    x, weight, bias = lo.packed_input(op.x), lo.weight(op.weight), lo.vector(op.bias)
    offset = _reads_offset(op, lo.program)
    lo.write(op.out, lambda out: lo.plan.linear(out, x, weight, bias, -1, offset))


def _linear_add(lo: _Lowering, op: ops.LinearAdd) -> None:
    x, weight, bias, residual = lo.packed_input(op.x), lo.weight(op.weight), lo.vector(op.bias), lo.buffer(op.residual)
    lo.write(op.out, lambda out: lo.plan.linear(out, x, weight, bias, residual, False))


def _qkv_rope_write(lo: _Lowering, op: ops.QkvRopeWrite) -> None:
    weights = [lo.weight(w) for w in (op.q, op.k, op.v)]
    biases = [lo.vector(b) for b in (op.q_bias, op.k_bias, op.v_bias)]
    lo.plan.qkv_rope_write(lo.buffer(op.out), lo.packed_input(op.x), lo.buffer(op.angles), weights, biases, lo.places[op.layer])


def _glu_linear(lo: _Lowering, op: ops.GluLinear) -> None:
    gate, up = lo.weight_pair(op.gate, op.up)
    x, gate_bias, up_bias = lo.packed_input(op.x), lo.vector(op.gate_bias), lo.vector(op.up_bias)
    lo.write(op.out, lambda out: lo.plan.glu_linear(out, x, gate, up, gate_bias, up_bias), packs_groups=True)


def _attention(lo: _Lowering, op: ops.Attention) -> None:
    def lower(out: int) -> None:
        lo.plan.attention(out, lo.buffer(op.q), lo.places[op.layer], op.num_heads, op.scale)

    lo.write(op.out, lower, packs_groups=op.head_dim % GROUP == 0)  # a head is then whole groups


def _gather_rows(lo: _Lowering, op: ops.GatherRows) -> None:
    lo.plan.gather_rows(lo.buffer(op.out), lo.buffer(op.x))


def _add(lo: _Lowering, op: ops.Add) -> None:
    lo.write(op.out, lambda out: lo.plan.add(out, lo.buffer(op.x), lo.buffer(op.y)))


def _glu(lo: _Lowering, op: ops.Glu) -> None:
    lo.write(op.out, lambda out: lo.plan.glu(out, lo.buffer(op.gate), lo.buffer(op.up)))


def _silu(lo: _Lowering, op: ops.Silu) -> None:
    lo.write(op.out, lambda out: lo.plan.silu(out, lo.buffer(op.x)))


_LOWER: dict[type[ops.Op], Callable[[_Lowering, Any], None]] = {
    ops.Embed: _embed,
    ops.Input: _input,
    ops.RopeAngles: _rope_angles,
    ops.Norm: _norm,
    ops.Linear: _linear,
    ops.LinearAdd: _linear_add,
    ops.QkvRopeWrite: _qkv_rope_write,
    ops.GluLinear: _glu_linear,
    ops.Attention: _attention,
    ops.GatherRows: _gather_rows,
    ops.Add: _add,
    ops.Glu: _glu,
    ops.Silu: _silu,
}
