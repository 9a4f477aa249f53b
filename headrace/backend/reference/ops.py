"""Every op in NumPy."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backend.reference.activations import activated, gated
from headrace.backend.reference.kv import Store
from headrace.backend.reference.top_blocks import hidden_positions
from headrace.batch import Ints, RaggedBatch
from headrace.config import KeyRounding, KvConfig
from headrace.program import moe, ops
from headrace.program.adapter import LowRank
from headrace.program.op import Op, RowKind, Value, Weight
from headrace.quant.kv import key_format, round_trip, value_format

Floats = NDArray[np.float64]


class Memory(Protocol):
    kv: KvConfig
    key_rounding: dict[int, KeyRounding]  # by layer
    stores: list[Store]  # by KV group
    places: dict[int, tuple[int, int]]  # layer: (KV group, index of the layer in the group)
    weights: dict[str, Floats]
    adapters: dict[int, Mapping[str, LowRank]]
    expert_rows: dict[int, NDArray[np.int64]]  # rows of each expert, by id of the output value


class Step:
    def __init__(self, memory: Memory, batch: RaggedBatch) -> None:
        self.memory = memory
        self.batch = batch
        self.rows: dict[int, Floats] = {}  # by id of the value
        self._visible: dict[int, list[Ints]] = {}  # by KV group

    def run(self, op: Op) -> None:
        result = RUN[type(op)](self, op)
        out = op.output()
        if out is not None and result is not None:
            self.rows[out.id] = result

    def x(self, value: Value) -> Floats:
        return self.rows[value.id]

    def w(self, weight: Weight) -> Floats:
        return self.memory.weights[weight.name]

    def rows_for(self, out: Value, x: Value) -> Floats:
        return self.x(x) if x.rows == out.rows else self.x(x)[self._gathered(out.rows)]

    def _gathered(self, kind: RowKind) -> slice:
        num_logit_rows = len(self.batch.logit_rows)
        match kind:
            case "logit":
                return slice(num_logit_rows)
            case "pooled":
                return slice(num_logit_rows, None)
        return slice(None)

    def linear(self, x: Value, weight: Weight, bias: Weight | None) -> Floats:
        y = self.product(self.x(x), weight, bias)
        for number, rows in self._adapted_rows(x.rows):
            if matrices := self.memory.adapters[number].get(weight.name):
                y[rows] += matrices.scale * (self.x(x)[rows] @ matrices.down.T @ matrices.up.T)
        return y

    def product(self, x: Floats, weight: Weight, bias: Weight | None) -> Floats:
        y = x @ self.w(weight).T
        return y if bias is None else y + self.w(bias)

    def _adapted_rows(self, kind: RowKind) -> Iterator[tuple[int, NDArray[np.bool]]]:
        batch = self.batch
        if batch.adapters is None:
            return

        adapter_of_row = np.repeat(batch.adapters, np.diff(batch.row_start))
        if kind != "step":
            adapter_of_row = adapter_of_row[batch.gathered_rows][self._gathered(kind)]
        for number in set(adapter_of_row.tolist()) - {-1}:
            yield number, adapter_of_row == number

    def visible(self, group: int) -> list[Ints]:
        """KV slots that each row sees without a window: context, earlier rows or ancestors,
        itself.
        """
        if group not in self._visible:
            self._visible[group] = self._visible_slots(group)
        return self._visible[group]

    def _visible_slots(self, group: int) -> list[Ints]:
        batch, block_size = self.batch, self.memory.kv.block_size
        table = batch.kv[group].block_table
        visible = []
        for b, first in enumerate(batch.row_start[:-1]):
            index = np.arange(batch.context_len[b] + batch.row_start[b + 1] - first)
            slots = table[b, index // block_size] * block_size + index % block_size
            for row in range(first, batch.row_start[b + 1]):
                visible.append(slots[self._visible_indices(b, row - first, row)])
        return visible

    def _visible_indices(self, b: int, local: int, row: int) -> Ints:
        """KV indices in sequence `b` that a row sees; `local`: its index in the step."""
        context = int(self.batch.context_len[b])
        num_scheduled = int(self.batch.scheduled_len[b])
        if local < num_scheduled or self.batch.ancestors is None:
            return np.arange(context + local + 1, dtype=np.int32)

        words = self.batch.ancestors[row]
        nodes = [i for i in range(64 * len(words)) if int(words[i // 64]) >> (i % 64) & 1]
        before_tree = context + num_scheduled
        return np.array(
            [*range(before_tree), *(before_tree + node for node in nodes)], dtype=np.int32
        )


def _embed(s: Step, op: ops.Embed) -> Floats:
    return s.w(op.weight)[s.batch.tokens]


def _embed_position(s: Step, op: ops.EmbedPosition) -> Floats:
    return s.w(op.weight)[np.minimum(s.batch.positions, op.weight.rows - 1)]


def _input(s: Step, op: ops.Input) -> Floats:
    assert s.batch.inputs is not None, "a program with input rows needs them"
    return s.batch.inputs.astype(np.float64)


def _rope_angles(s: Step, op: ops.RopeAngles) -> Floats:
    angles = s.batch.positions[:, None] * np.array(op.inverse_frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * op.scale


def norm(s: Step, op: ops.Norm) -> Floats:
    # The number of groups is explicit: numpy cannot infer it if there are no rows.
    x = s.rows_for(op.out, op.x).reshape(-1, op.x.width // op.size, op.size)
    if op.kind == "layer":
        x = x - np.mean(x, axis=2, keepdims=True)
    mean_square: Floats = np.mean(x * x, axis=2, keepdims=True)
    y = x / np.sqrt(mean_square + op.eps) * s.w(op.weight).reshape(-1, op.size)
    if op.bias:
        y = y + s.w(op.bias).reshape(-1, op.size)
    return y.reshape(-1, op.x.width)


def _linear(s: Step, op: ops.Linear) -> Floats:
    return s.linear(op.x, op.weight, op.bias)


def _linear_activate(s: Step, op: ops.LinearActivate) -> Floats:
    return activated(s.linear(op.x, op.weight, op.bias), op.activation)


def _linear_add(s: Step, op: ops.LinearAdd) -> Floats:
    return s.x(op.residual) + s.linear(op.x, op.weight, op.bias)


def _head_linear(s: Step, op: ops.HeadLinear) -> Floats:
    heads = _heads(s.x(op.x), len(op.heads), op.heads[0].cols)
    products = [x @ s.w(weight).T for x, weight in zip(heads, op.heads, strict=True)]
    return np.concatenate(products, axis=1)


def _concat_heads(s: Step, op: ops.ConcatHeads) -> Floats:
    x = _heads(s.x(op.x), op.num_heads, op.x_dim)
    y = _heads(s.x(op.y), op.num_heads, op.y_dim)
    parts = [part for pair in zip(x, y, strict=True) for part in pair]
    return np.concatenate(parts, axis=1)


def _heads(x: Floats, num_heads: int, dim: int) -> list[Floats]:
    return [x[:, head * dim % x.shape[1] :][:, :dim] for head in range(num_heads)]


def rotate(x: Floats, angles: Floats, head_dim: int) -> Floats:
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    heads = x.reshape(len(x), -1, head_dim).copy()
    even, odd = heads[..., : 2 * half : 2].copy(), heads[..., 1 : 2 * half : 2].copy()
    heads[..., : 2 * half : 2] = even * cos - odd * sin
    heads[..., 1 : 2 * half : 2] = even * sin + odd * cos
    return heads.reshape(x.shape)


def _rope(s: Step, op: ops.Rope) -> Floats:
    return rotate(s.x(op.x), s.x(op.angles), op.head_dim)


def _write_kv(s: Step, layer: int, k: Floats, v: Floats | None) -> None:
    """Store keys and values, rounded to the KV's number format."""
    group, place = s.memory.places[layer]
    store, slots = s.memory.stores[group], s.batch.kv[group].slots
    dtype = s.memory.kv.dtype
    keys = k.reshape(-1, *store.keys.shape[2:])
    store.keys[place, slots] = round_trip(keys, key_format(dtype), s.memory.key_rounding.get(layer))
    if v is not None:
        values = v.reshape(-1, *store.values.shape[2:])
        store.values[place, slots] = round_trip(values, value_format(dtype))


def _kv_write(s: Step, op: ops.KvWrite) -> None:
    _write_kv(s, op.layer, s.x(op.k), s.x(op.v) if op.v else None)


def _qkv_rope_write(s: Step, op: ops.QkvRopeWrite) -> Floats:
    q = s.linear(op.x, op.q, op.q_bias)
    k = s.linear(op.x, op.k, op.k_bias)
    v = s.linear(op.x, op.v, op.v_bias)
    angles = s.x(op.angles)
    _write_kv(s, op.layer, rotate(k, angles, op.head_dim), v)
    return rotate(q, angles, op.head_dim)


def _attention(s: Step, op: ops.Attention) -> Floats:
    q = s.x(op.q).reshape(len(s.batch.tokens), op.num_kv_heads, -1, op.head_dim)
    out = np.empty_like(q, shape=(*q.shape[:3], op.value_dim))
    group, place = s.memory.places[op.layer]
    store = s.memory.stores[group]
    slopes = np.array(op.slopes or [0.0] * op.num_heads).reshape(op.num_kv_heads, -1, 1)
    sinks = s.w(op.sinks).reshape(op.num_kv_heads, -1, 1) if op.sinks else None
    biases = None
    if op.key_bias:
        num_positions = 1 + max(s.batch.positions, default=0)
        biases = rotated_key_biases(op, s.w(op.key_bias), num_positions)

    for row, slots in enumerate(s.visible(group)):
        num_seen = len(slots)
        window_start = max(0, num_seen - op.window) if op.window else 0
        if window_start <= op.num_sink_tokens:
            window_start = 0
        num_sink_tokens = min(window_start, op.num_sink_tokens)
        positions = np.array([*range(num_sink_tokens), *range(window_start, num_seen)])
        seen = slots[positions]
        k = store.keys[place, seen]  # [seen, kv heads, head_dim]
        v = k[..., : op.value_dim] if op.is_latent else store.values[place, seen]
        if biases is not None:
            k = k + biases[positions]

        scores = np.einsum("hgd,shd->hgs", q[row], k) * op.scale
        if op.softcap:
            scores = op.softcap * np.tanh(scores / op.softcap)
        scores = scores - slopes * (num_seen - 1 - positions)
        if op.top_blocks:
            keys = store.keys[place, slots]
            hidden = hidden_positions(op, s.memory.kv.dtype, q[row], keys, biases, window_start)
            scores = np.where(hidden[:, None, positions], -np.inf, scores)

        max_score = scores.max(axis=2, keepdims=True)
        if sinks is not None:
            max_score = np.maximum(max_score, sinks)
        weights = np.exp(scores - max_score)
        total = weights.sum(axis=2, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks - max_score)
        out[row] = np.einsum("hgs,shd->hgd", weights / total, v)
    return out.reshape(len(q), -1)


def rotated_key_biases(op: ops.Attention, bias: Floats, num_positions: int) -> Floats:
    """What keys are stored without, [positions, KV heads, head_dim]."""
    positions = np.arange(num_positions)
    angles = positions[:, None] * np.array(op.key_frequencies)
    factors = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * op.key_factor
    biases = np.tile(bias.reshape(1, -1), (len(positions), 1))
    return rotate(biases, factors, op.head_dim).reshape(len(positions), -1, op.head_dim)


def _activate(s: Step, op: ops.Activate) -> Floats:
    return activated(s.x(op.x), op.activation)


def _threshold(s: Step, op: ops.Threshold) -> Floats:
    x = s.x(op.x)
    return np.where(np.abs(x) <= op.least, 0, x)


def _scale(s: Step, op: ops.Scale) -> Floats:
    return op.factor * s.x(op.x)


def _soft_cap(s: Step, op: ops.SoftCap) -> Floats:
    return op.cap * np.tanh(s.x(op.x) / op.cap)


def _glu(s: Step, op: ops.Glu) -> Floats:
    return gated(s.x(op.gate), s.x(op.up), op.activation)


def _glu_linear(s: Step, op: ops.GluLinear) -> Floats:
    gate = s.linear(op.x, op.gate, op.gate_bias)
    up = s.linear(op.x, op.up, op.up_bias)
    return gated(gate, up, op.activation)


def _add(s: Step, op: ops.Add) -> Floats:
    return s.x(op.x) + s.x(op.y)


def _exit_choice(s: Step, op: ops.ExitChoice) -> Floats:
    early = s.x(op.early)
    late = np.full_like(early, np.nan) if op.late is None else s.x(op.late)
    weights = np.exp(early - early.max(axis=1, keepdims=True))
    best = np.sort(weights, axis=1)[:, -2:] / weights.sum(axis=1, keepdims=True)
    leaves = best[:, -1] - best[:, 0] >= op.min_margin  # False for NaN
    return np.where(leaves[:, None], early, late)


def _gather_rows(s: Step, op: ops.GatherRows) -> Floats:
    return s.x(op.x)[s.batch.gathered_rows]


def _route(s: Step, op: moe.Route) -> Floats:
    logits = s.x(op.x)
    if op.scoring == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = scores / scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    ranking = scores if op.bias is None else scores + s.w(op.bias)
    if op.groups > 1:
        ranking = _mask_groups(ranking, op)

    experts = np.argsort(-ranking, axis=1, kind="stable")[:, : op.top_k]
    weights = np.take_along_axis(scores, experts, axis=1)
    not_finite = ~np.isfinite(logits).all(axis=1)
    experts[not_finite], weights[not_finite] = np.arange(op.top_k), np.nan
    if op.normalised:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return np.concatenate([experts, weights * op.factor], axis=1)


def _mask_groups(ranking: Floats, op: moe.Route) -> Floats:
    group_size = op.x.width // op.groups
    ascending = np.sort(ranking.reshape(-1, op.groups, group_size), axis=2)
    num_best = 1 if op.scoring == "softmax" else 2
    group_scores = ascending[:, :, -num_best:].sum(axis=2)
    chosen = np.argsort(-group_scores, axis=1, kind="stable")[:, : op.top_groups]
    is_chosen = np.zeros(group_scores.shape, bool)
    np.put_along_axis(is_chosen, chosen, True, axis=1)
    return np.where(np.repeat(is_chosen, group_size, axis=1), ranking, -np.inf)


def _experts(s: Step, op: moe.Experts) -> Floats:
    x, routing = s.x(op.x), s.x(op.routing)
    experts, weights = routing[:, : op.top_k].astype(np.int64), routing[:, op.top_k :]
    results = np.empty((len(x), op.top_k, op.out.width))
    for expert in np.unique(experts):
        rows, choices = np.nonzero(experts == expert)
        s.memory.expert_rows[op.out.id][expert] += len(rows)
        gate, up, down = (
            (weight[expert], bias[expert] if bias else None)
            for weight, bias in (
                (op.gate, op.gate_bias),
                (op.up, op.up_bias),
                (op.down, op.down_bias),
            )
        )
        hidden = gated(s.product(x[rows], *gate), s.product(x[rows], *up), op.activation)
        results[rows, choices] = s.product(hidden, *down)
    combined: Floats = (results * weights[:, :, None]).sum(axis=1)
    return combined


def _gate_rows(s: Step, op: moe.GateRows) -> Floats:
    y: Floats = s.x(op.x) / (1 + np.exp(-s.x(op.gate)))
    return y


RUN: dict[type[Op], Callable[[Step, Any], Floats | None]] = {
    ops.Embed: _embed,
    ops.EmbedPosition: _embed_position,
    ops.Input: _input,
    ops.RopeAngles: _rope_angles,
    ops.Norm: norm,
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
    ops.GluLinear: _glu_linear,
    ops.Activate: _activate,
    ops.Threshold: _threshold,
    ops.Scale: _scale,
    ops.SoftCap: _soft_cap,
    ops.Add: _add,
    ops.ExitChoice: _exit_choice,
    ops.GatherRows: _gather_rows,
    moe.Route: _route,
    moe.Experts: _experts,
    moe.GateRows: _gate_rows,
}
