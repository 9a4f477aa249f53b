"""The reference backend: NumPy, op by op, readable. It is the truth that every other backend is
held to in tests.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend import HostBlocks, expert_table, host_block_counts
from headrace.backend.reference import moe as reference_mixture
from headrace.backend.reference.activations import activated, gated
from headrace.backend.reference.kv import ReferenceHostBlocks, Store
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import Activations, KvConfig
from headrace.logit_ops import Done, LogitOp, LogitOpResult, StepResult
from headrace.program import moe as mixture
from headrace.program import ops
from headrace.program.adapter import Adapter
from headrace.program.op import Op, RowKind, Value, Weight
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.quant.kv import stored
from headrace.sampling.host import run_logit_ops, tokens_of

Floats = NDArray[np.float64]
_DTYPE = np.float64


def lower(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The program op by op, with the bytes of weights in float64."""
    size = np.dtype(_DTYPE).itemsize
    return program.with_weights(
        {
            w.name: replace(w, nbytes=size * w.rows * w.cols, kind="f32")
            for w in program.weights.values()
        }
    )


def compile(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int,
    activations: Activations = "f32",
) -> "ReferenceExecutable":
    """Compile for NumPy; `threads` is NumPy's own affair, and activations are float64."""
    return ReferenceExecutable(program, weights, kv)


class ReferenceExecutable:
    """Interprets a program in float64. A launch runs at once."""

    max_in_flight = 1

    def __init__(self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig) -> None:
        self.program = lower(program, weights)
        self.kv = kv
        self.weights = _floats(program, weights)
        self.kv_groups = program.kv_groups
        self.stores = [
            Store(group, num_blocks * kv.block_size)
            for group, num_blocks in zip(self.kv_groups, kv.num_blocks, strict=True)
        ]
        self.places = {
            layer: (number, i)
            for number, group in enumerate(self.kv_groups)
            for i, layer in enumerate(group.layers)
        }
        self._results: list[LogitOpResult] = []
        """Results of the logit ops of the last launch."""
        self.loads = _no_loads(self.program)
        self.adapters: dict[int, Adapter] = {}

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
        step = _Step(self, batch._replace(tokens=tokens_of(batch, self._results)))
        for op in self.program.ops:
            step.run(op)
        assert self.program.logits, "a stage without logits is run with all others"
        rows = step.rows[self.program.logits.id].astype(np.float32)
        pooled = (
            step.rows[self.program.pooled.id].astype(np.float32) if self.program.pooled else None
        )
        self._results = run_logit_ops(ops, rows, pooled)
        kept = (
            step.rows[self.program.hidden.id].astype(np.float32)
            if hidden and self.program.hidden
            else None
        )
        return Done(StepResult(self._results, rows if logits else None, kept))

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "ReferenceExecutable":
        if kv is not None:
            return ReferenceExecutable(program, weights, kv)
        other = copy(self)
        other.program = lower(program, weights)
        other.weights = _floats(program, weights, self.weights)
        other.loads = _no_loads(other.program)
        return other

    def profile(self, batch: RaggedBatch) -> StepTimes:
        started = time.perf_counter()
        step, ops = _Step(self, batch), dict.fromkeys((op.name for op in self.program.ops), 0.0)
        for op in self.program.ops:
            before = time.perf_counter()
            step.run(op)
            ops[op.name] += time.perf_counter() - before
        return StepTimes(time.perf_counter() - started, ops, 0)

    def expert_loads(self) -> NDArray[np.int64]:
        return expert_table([loads.tolist() for loads in self.loads.values()])

    def add_adapter(self, adapter: Adapter) -> int:
        number = next(number for number in count() if number not in self.adapters)
        self.adapters[number] = adapter
        return number

    def remove_adapter(self, number: int) -> None:
        del self.adapters[number]

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        store = self.stores[group]
        for cache in (store.keys, store.values):
            for s, t in zip(source, target, strict=True):
                cache[:, t] = cache[:, s]

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        blocks = [
            (num, store.block_bytes(self.kv.block_size))
            for num, store in zip(self.kv.num_blocks, self.stores, strict=True)
        ]
        counts = host_block_counts(num_bytes, blocks)
        return ReferenceHostBlocks(self.stores, counts, self.kv.block_size) if all(counts) else None

    def close(self) -> None:
        self.weights.clear()
        self.stores.clear()


def _no_loads(program: Program) -> dict[int, NDArray[np.int64]]:
    """Rows that have gone to each expert, none yet, by the id of what the op over experts
    writes.
    """
    return {
        op.out.id: np.zeros(len(op.gate), np.int64)
        for op in program.ops
        if isinstance(op, mixture.Experts)
    }


def _floats(
    program: Program,
    weights: Mapping[str, StoredTensor],
    known: Mapping[str, Floats] = MappingProxyType({}),
) -> dict[str, Floats]:
    return {
        name: known[name] if name in known else weights[name].dequantise().astype(_DTYPE)
        for name in program.weights
    }


class _Step:
    """The values of one step: a matrix for each value id."""

    def __init__(self, executable: ReferenceExecutable, batch: RaggedBatch) -> None:
        self.executable = executable
        self.batch = batch
        self.rows: dict[int, Floats] = {}
        self._visible: dict[int, list[Ints]] = {}  # by group

    def run(self, op: Op) -> None:
        out, result = op.output(), _RUN[type(op)](self, op)
        if out is not None and result is not None:
            self.rows[out.id] = result

    def x(self, value: Value) -> Floats:
        return self.rows[value.id]

    def some_rows(self, x: Value, out: Value) -> Floats:
        """The rows of a value that another has, which may have some of the gathered ones alone."""
        return self.x(x) if x.rows == out.rows else self.x(x)[self._gathered(out.rows)]

    def _gathered(self, kind: RowKind) -> slice:
        """Which of the gathered rows are of a kind."""
        num_logit_rows = len(self.batch.logit_rows)
        return (
            slice(num_logit_rows)
            if kind == "logit"
            else slice(num_logit_rows, None)
            if kind == "pooled"
            else slice(None)
        )

    def w(self, weight: Weight) -> Floats:
        return self.executable.weights[weight.name]

    def matmul(self, x: Value, weight: Weight, bias: Weight | None) -> Floats:
        y = self.product(self.x(x), weight, bias)
        for number, rows in self._adapted_rows(x.rows):
            if matrices := self.executable.adapters[number].get(weight.name):
                y[rows] += matrices.scale * (self.x(x)[rows] @ matrices.down.T @ matrices.up.T)
        return y

    def _adapted_rows(self, kind: RowKind) -> Iterator[tuple[int, NDArray[np.bool]]]:
        """The adapters of the step, each with the rows of this kind that have it."""
        batch = self.batch
        if batch.adapters is None:
            return
        of_row = np.repeat(batch.adapters, np.diff(batch.row_start))
        if kind != "step":
            of_row = of_row[batch.gathered_rows][self._gathered(kind)]
        for number in set(of_row.tolist()) - {-1}:
            yield number, of_row == number

    def product(self, x: Floats, weight: Weight, bias: Weight | None) -> Floats:
        y = x @ self.w(weight).T
        return y if bias is None else y + self.w(bias)

    def visible(self, group: int) -> list[Ints]:
        """Slots of a group that each row sees, in position order: the context, then its ancestors
        in the step and itself.
        """
        if group not in self._visible:
            self._visible[group] = self._slots_seen(group)
        return self._visible[group]

    def _slots_seen(self, group: int) -> list[Ints]:
        batch, block, table = (
            self.batch,
            self.executable.kv.block_size,
            self.batch.kv[group].block_table,
        )
        result = []
        for b, first in enumerate(batch.row_start[:-1]):
            index = np.arange(batch.context_len[b] + batch.row_start[b + 1] - first)
            slots = table[b, index // block] * block + index % block
            for row in range(first, batch.row_start[b + 1]):
                result.append(slots[self._seen_indices(b, row - first, row)])
        return result

    def _seen_indices(self, b: int, local: int, row: int) -> Ints:
        context, num_scheduled = int(self.batch.context_len[b]), int(self.batch.scheduled_len[b])
        if local < num_scheduled or self.batch.ancestors is None:
            return np.arange(context + local + 1, dtype=np.int32)
        words = self.batch.ancestors[row]
        nodes = [i for i in range(64 * len(words)) if int(words[i // 64]) >> (i % 64) & 1]
        return np.array(
            [*range(context + num_scheduled), *(context + num_scheduled + i for i in nodes)],
            dtype=np.int32,
        )


def _embed(s: _Step, op: ops.Embed) -> Floats:
    return s.w(op.weight)[s.batch.tokens]


def _embed_position(s: _Step, op: ops.EmbedPosition) -> Floats:
    return s.w(op.weight)[np.minimum(s.batch.positions, op.weight.rows - 1)]


def _input(s: _Step, op: ops.Input) -> Floats:
    assert s.batch.inputs is not None, "a program with input rows needs them"
    return s.batch.inputs.astype(_DTYPE)


def _rope_angles(s: _Step, op: ops.RopeAngles) -> Floats:
    angles = s.batch.positions[:, None] * np.array(op.inverse_frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * op.scale


def _norm(s: _Step, op: ops.Norm) -> Floats:
    x = s.some_rows(op.x, op.out).reshape(
        -1, op.x.width // op.size, op.size
    )  # there may be no rows
    if op.kind == "layer":
        x = x - np.mean(x, axis=2, keepdims=True)
    mean_square: Floats = np.mean(x * x, axis=2, keepdims=True)
    y = x / np.sqrt(mean_square + op.eps) * s.w(op.weight).reshape(-1, op.size)
    if op.bias:
        y = y + s.w(op.bias).reshape(-1, op.size)
    return y.reshape(-1, op.x.width)


def _linear(s: _Step, op: ops.Linear) -> Floats:
    return s.matmul(op.x, op.weight, op.bias)


def _linear_activate(s: _Step, op: ops.LinearActivate) -> Floats:
    return activated(s.matmul(op.x, op.weight, op.bias), op.activation)


def _linear_add(s: _Step, op: ops.LinearAdd) -> Floats:
    return s.x(op.residual) + s.matmul(op.x, op.weight, op.bias)


def _head_linear(s: _Step, op: ops.HeadLinear) -> Floats:
    parts = _heads(s.x(op.x), len(op.heads), op.heads[0].cols)
    return np.concatenate(
        [parts[head] @ s.w(weight).T for head, weight in enumerate(op.heads)], axis=1
    )


def _concat_heads(s: _Step, op: ops.ConcatHeads) -> Floats:
    x, y = _heads(s.x(op.x), op.num_heads, op.x_dim), _heads(s.x(op.y), op.num_heads, op.y_dim)
    return np.concatenate(
        [part for head in range(op.num_heads) for part in (x[head], y[head])], axis=1
    )


def _heads(x: Floats, num_heads: int, dim: int) -> list[Floats]:
    """The columns of each head; all of them for each, where the heads share one."""
    return [x[:, head * dim % x.shape[1] :][:, :dim] for head in range(num_heads)]


def _rotate(x: Floats, angles: Floats, head_dim: int) -> Floats:
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    heads = x.reshape(len(x), -1, head_dim).copy()
    even, odd = heads[..., : 2 * half : 2].copy(), heads[..., 1 : 2 * half : 2].copy()
    heads[..., : 2 * half : 2] = even * cos - odd * sin
    heads[..., 1 : 2 * half : 2] = even * sin + odd * cos
    return heads.reshape(x.shape)


def _rope(s: _Step, op: ops.Rope) -> Floats:
    return _rotate(s.x(op.x), s.x(op.angles), op.head_dim)


def _write(s: _Step, layer: int, k: Floats, v: Floats | None) -> None:
    group, place = s.executable.places[layer]
    store, slots = s.executable.stores[group], s.batch.kv[group].slots
    for cache, rows in ((store.keys, k), (store.values, v)):
        if rows is not None:
            cache[place, slots] = stored(rows.reshape(-1, *cache.shape[2:]), s.executable.kv.dtype)


def _kv_write(s: _Step, op: ops.KvWrite) -> None:
    _write(s, op.layer, s.x(op.k), s.x(op.v) if op.v else None)


def _qkv_rope_write(s: _Step, op: ops.QkvRopeWrite) -> Floats:
    q, k, v = (
        s.matmul(op.x, w, b) for w, b in ((op.q, op.q_bias), (op.k, op.k_bias), (op.v, op.v_bias))
    )
    angles = s.x(op.angles)
    _write(s, op.layer, _rotate(k, angles, op.head_dim), v)
    return _rotate(q, angles, op.head_dim)


def _attention(s: _Step, op: ops.Attention) -> Floats:
    q = s.x(op.q).reshape(len(s.batch.tokens), op.num_kv_heads, -1, op.head_dim)
    out = np.empty_like(q, shape=(*q.shape[:3], op.value_dim))
    group, place = s.executable.places[op.layer]
    store = s.executable.stores[group]
    slopes = np.array(op.slopes or [0.0] * op.num_heads).reshape(op.num_kv_heads, -1, 1)
    sinks = s.w(op.sinks).reshape(op.num_kv_heads, -1, 1) if op.sinks else None
    for row, slots in enumerate(s.visible(group)):
        before = max(0, len(slots) - op.window) if op.window else 0
        at = np.array([*range(min(before, op.num_sink_tokens)), *range(before, len(slots))])
        seen = slots[at]
        k = store.keys[place, seen]  # [seen, kv heads, head_dim]
        v = k[..., : op.value_dim] if op.latent else store.values[place, seen]
        scores = np.einsum("hgd,shd->hgs", q[row], k) * op.scale
        if op.softcap:
            scores = op.softcap * np.tanh(scores / op.softcap)
        scores = scores - slopes * (len(slots) - 1 - at)
        most = scores.max(axis=2, keepdims=True)
        if sinks is not None:
            most = np.maximum(most, sinks)
        weights = np.exp(scores - most)
        total = weights.sum(axis=2, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks - most)
        out[row] = np.einsum("hgs,shd->hgd", weights / total, v)
    return out.reshape(len(q), -1)


def _activate(s: _Step, op: ops.Activate) -> Floats:
    return activated(s.x(op.x), op.activation)


def _scale(s: _Step, op: ops.Scale) -> Floats:
    return op.factor * s.x(op.x)


def _soft_cap(s: _Step, op: ops.SoftCap) -> Floats:
    return op.cap * np.tanh(s.x(op.x) / op.cap)


def _glu(s: _Step, op: ops.Glu) -> Floats:
    return gated(s.x(op.gate), s.x(op.up), op.activation)


def _glu_linear(s: _Step, op: ops.GluLinear) -> Floats:
    return gated(
        s.matmul(op.x, op.gate, op.gate_bias), s.matmul(op.x, op.up, op.up_bias), op.activation
    )


def _add(s: _Step, op: ops.Add) -> Floats:
    return s.x(op.x) + s.x(op.y)


def _gather_rows(s: _Step, op: ops.GatherRows) -> Floats:
    return s.x(op.x)[s.batch.gathered_rows]


_RUN: dict[type[Op], Callable[[_Step, Any], Floats | None]] = {
    ops.Embed: _embed,
    ops.EmbedPosition: _embed_position,
    ops.Input: _input,
    ops.RopeAngles: _rope_angles,
    ops.Norm: _norm,
    ops.Linear: _linear,
    ops.LinearActivate: _linear_activate,
    ops.LinearAdd: _linear_add,
    ops.HeadLinear: _head_linear,
    ops.ConcatHeads: _concat_heads,
    ops.Rope: _rope,
    ops.KvWrite: _kv_write,
    ops.QkvRopeWrite: _qkv_rope_write,
    ops.Attention: _attention,
    ops.Glu: _glu,
    ops.Activate: _activate,
    ops.Scale: _scale,
    mixture.Route: reference_mixture.route,
    mixture.Experts: reference_mixture.experts,
    mixture.GateRows: reference_mixture.gate_rows,
    ops.SoftCap: _soft_cap,
    ops.GluLinear: _glu_linear,
    ops.Add: _add,
    ops.GatherRows: _gather_rows,
}
