"""The reference backend: NumPy, op by op, readable. It is the truth that every other backend is held to in tests."""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import KvConfig
from headrace.logit_ops import Done, LogitOp, LogitOpResult, StepResult
from headrace.program import ops
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.quant.kv import stored
from headrace.sampling.host import run_logit_ops, tokens_of

Floats = NDArray[np.float64]
_DTYPE = np.float64


def lower(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The program op by op, with the bytes of weights in float64."""
    size = np.dtype(_DTYPE).itemsize
    return program.with_weights({w.name: replace(w, nbytes=size * w.rows * w.cols, kind="f32") for w in program.weights.values()})


def compile(program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig, threads: int) -> "ReferenceExecutable":
    """Compile for NumPy; `threads` is NumPy's own affair."""
    return ReferenceExecutable(program, weights, kv)


class ReferenceExecutable:
    """Interprets a program in float64. A launch runs at once."""

    max_in_flight = 1

    def __init__(self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig) -> None:
        self.program = lower(program, weights)
        self.kv = kv
        self.weights = _floats(program, weights)
        self.kv_groups = program.kv_groups
        self.stores = [_Store(group, num_blocks * kv.block_size) for group, num_blocks in zip(self.kv_groups, kv.num_blocks, strict=True)]
        self.places = {layer: (number, i) for number, group in enumerate(self.kv_groups) for i, layer in enumerate(group.layers)}
        self._results: list[LogitOpResult] = []
        """Results of the logit ops of the last launch."""

    def launch(self, batch: RaggedBatch, ops: Sequence[LogitOp] = (), *, logits: bool = False, hidden: bool = False) -> Done:
        step = _Step(self, batch._replace(tokens=tokens_of(batch, self._results)))
        for op in self.program.ops:
            step.run(op)
        rows = step.rows[self.program.logits.id].astype(np.float32)
        self._results = run_logit_ops(ops, rows)
        kept = step.rows[self.program.hidden.id].astype(np.float32) if hidden and self.program.hidden else None
        return Done(StepResult(self._results, rows if logits else None, kept))

    def attach(self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None) -> "ReferenceExecutable":
        if kv is not None:
            return ReferenceExecutable(program, weights, kv)
        other = copy(self)
        other.program = lower(program, weights)
        other.weights = _floats(program, weights, self.weights)
        return other

    def profile(self, batch: RaggedBatch) -> StepTimes:
        started = time.perf_counter()
        step, ops = _Step(self, batch), dict.fromkeys((op.name for op in self.program.ops), 0.0)
        for op in self.program.ops:
            before = time.perf_counter()
            step.run(op)
            ops[op.name] += time.perf_counter() - before
        return StepTimes(time.perf_counter() - started, ops, 0)

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        store = self.stores[group]
        for cache in (store.keys, store.values):
            for s, t in zip(source, target, strict=True):
                cache[:, t] = cache[:, s]

    def close(self) -> None:
        self.weights.clear()
        self.stores.clear()


class _Store:
    """Keys and values of a group of layers, [layers, slots, heads, numbers]."""

    def __init__(self, group: KvGroup, num_slots: int) -> None:
        layout, shape = group.layout, (len(group.layers), num_slots, group.layout.num_heads)
        self.keys = np.zeros((*shape, layout.key_dim), _DTYPE)
        self.values = np.zeros((*shape, layout.value_dim), _DTYPE)


def _floats(program: Program, weights: Mapping[str, StoredTensor], known: Mapping[str, Floats] = MappingProxyType({})) -> dict[str, Floats]:
    return {name: known[name] if name in known else weights[name].dequantise().astype(_DTYPE) for name in program.weights}


class _Step:
    """The values of one step: a matrix for each value id."""

    def __init__(self, executable: ReferenceExecutable, batch: RaggedBatch) -> None:
        self.executable = executable
        self.batch = batch
        self.rows: dict[int, Floats] = {}
        self._visible: dict[int, list[Ints]] = {}  # by group

    def run(self, op: ops.Op) -> None:
        out, result = op.output(), _RUN[type(op)](self, op)
        if out is not None and result is not None:
            self.rows[out.id] = result

    def x(self, value: ops.Value) -> Floats:
        return self.rows[value.id]

    def w(self, weight: ops.Weight) -> Floats:
        return self.executable.weights[weight.name]

    def matmul(self, x: ops.Value, weight: ops.Weight, bias: ops.Weight | None) -> Floats:
        y = self.x(x) @ self.w(weight).T
        return y if bias is None else y + self.w(bias)

    def visible(self, group: int) -> list[Ints]:
        """Slots of a group that each row sees, in position order: the context, then its ancestors in the step and itself."""
        if group not in self._visible:
            self._visible[group] = self._slots_seen(group)
        return self._visible[group]

    def _slots_seen(self, group: int) -> list[Ints]:
        batch, block, table = self.batch, self.executable.kv.block_size, self.batch.kv[group].block_table
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
        return np.array([*range(context + num_scheduled), *(context + num_scheduled + i for i in nodes)], dtype=np.int32)


def _embed(s: _Step, op: ops.Embed) -> Floats:
    return s.w(op.weight)[s.batch.tokens]


def _input(s: _Step, op: ops.Input) -> Floats:
    assert s.batch.inputs is not None, "a program with input rows needs them"
    return s.batch.inputs.astype(_DTYPE)


def _rope_angles(s: _Step, op: ops.RopeAngles) -> Floats:
    angles = s.batch.positions[:, None] * np.array(op.inverse_frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * op.scale


def _norm(s: _Step, op: ops.Norm) -> Floats:
    x = s.x(op.x)
    mean_square: Floats = np.mean(x * x, axis=1, keepdims=True)
    return x / np.sqrt(mean_square + op.eps) * s.w(op.weight)


def _linear(s: _Step, op: ops.Linear) -> Floats:
    return s.matmul(op.x, op.weight, op.bias)


def _linear_add(s: _Step, op: ops.LinearAdd) -> Floats:
    return s.x(op.residual) + s.matmul(op.x, op.weight, op.bias)


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


def _write(s: _Step, layer: int, k: Floats, v: Floats) -> None:
    group, place = s.executable.places[layer]
    store, slots = s.executable.stores[group], s.batch.kv[group].slots
    for cache, rows in ((store.keys, k), (store.values, v)):
        cache[place, slots] = stored(rows.reshape(-1, *cache.shape[2:]), s.executable.kv.dtype)


def _kv_write(s: _Step, op: ops.KvWrite) -> None:
    _write(s, op.layer, s.x(op.k), s.x(op.v))


def _qkv_rope_write(s: _Step, op: ops.QkvRopeWrite) -> Floats:
    q, k, v = (s.matmul(op.x, w, b) for w, b in ((op.q, op.q_bias), (op.k, op.k_bias), (op.v, op.v_bias)))
    angles = s.x(op.angles)
    _write(s, op.layer, _rotate(k, angles, op.head_dim), v)
    return _rotate(q, angles, op.head_dim)


def _attention(s: _Step, op: ops.Attention) -> Floats:
    q = s.x(op.q).reshape(len(s.batch.tokens), op.num_kv_heads, -1, op.head_dim)
    out = np.empty_like(q)
    group, place = s.executable.places[op.layer]
    store = s.executable.stores[group]
    for row, slots in enumerate(s.visible(group)):
        seen = slots[-op.window :] if op.window else slots
        k, v = store.keys[place, seen], store.values[place, seen]  # [seen, kv heads, head_dim]
        scores = np.einsum("hgd,shd->hgs", q[row], k) * op.scale
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        out[row] = np.einsum("hgs,shd->hgd", weights / weights.sum(axis=2, keepdims=True), v)
    return out.reshape(len(q), -1)


def _silu_of(x: Floats) -> Floats:
    silu: Floats = x / (1 + np.exp(-x))
    return silu


def _silu_mul(gate: Floats, up: Floats) -> Floats:
    return _silu_of(gate) * up


def _silu(s: _Step, op: ops.Silu) -> Floats:
    return _silu_of(s.x(op.x))


def _glu(s: _Step, op: ops.Glu) -> Floats:
    return _silu_mul(s.x(op.gate), s.x(op.up))


def _glu_linear(s: _Step, op: ops.GluLinear) -> Floats:
    return _silu_mul(s.matmul(op.x, op.gate, op.gate_bias), s.matmul(op.x, op.up, op.up_bias))


def _add(s: _Step, op: ops.Add) -> Floats:
    return s.x(op.x) + s.x(op.y)


def _gather_rows(s: _Step, op: ops.GatherRows) -> Floats:
    return s.x(op.x)[s.batch.logit_rows]


_RUN: dict[type[ops.Op], Callable[[_Step, Any], Floats | None]] = {
    ops.Embed: _embed,
    ops.Input: _input,
    ops.RopeAngles: _rope_angles,
    ops.Norm: _norm,
    ops.Linear: _linear,
    ops.LinearAdd: _linear_add,
    ops.Rope: _rope,
    ops.KvWrite: _kv_write,
    ops.QkvRopeWrite: _qkv_rope_write,
    ops.Attention: _attention,
    ops.Glu: _glu,
    ops.Silu: _silu,
    ops.GluLinear: _glu_linear,
    ops.Add: _add,
    ops.GatherRows: _gather_rows,
}
