"""Lowers a program to a native plan."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.packing import (
    GROUP,
    add_weight,
    add_weight_pair,
    column_order,
    named_in_errors,
)
from headrace.batch import Ints
from headrace.program import collective, moe, ops
from headrace.program.fuse import LINEAR_OPS
from headrace.program.op import Op, Value, Weight
from headrace.program.trace import Program
from headrace.quant.formats import Format, StoredTensor

_TRANSPARENT_OPS = (
    ops.Norm,
    ops.Rope,
    ops.Scale,
    ops.SoftCap,
    ops.ExitChoice,
    ops.ConcatHeads,
    collective.AllGather,
    collective.TakeColumns,
    collective.ColumnsToRows,
    collective.GatherShares,
)
Floats = NDArray[np.float32]
_Readers = frozenset[tuple[Format, bool]]
"""(format of a weight, whether it needs an offset) of each."""
_Shape = tuple[int, str, bool, _Readers]


class ProcessGroup(Protocol):
    """Exchanges rows with other ranks."""

    def begin(self, tokens: Ints) -> None:
        """Prepare for a step over these tokens, [rows]."""

    def run(self, op: collective.Collective, out: Floats | None, *inputs: Floats) -> None:
        """Read `inputs`, and write `out`. Raises RankLostError."""


class Lowering:
    """Fills a native plan with ops, weights and buffers."""

    def __init__(
        self,
        plan: _native.Plan,
        program: Program,
        weights: Mapping[str, StoredTensor],
        places: Mapping[int, tuple[int, int]],
        earlier: "Lowering | None",
        kept: frozenset[int] = frozenset(),
        process_group: ProcessGroup | None = None,
    ) -> None:
        """`places`: (KV group, index) of each layer. `earlier` shares weights and buffers.
        `kept`: ids of values that can be read after a step.
        """
        self.plan = plan
        self.program = program
        self.process_group = process_group
        self.places = places
        self.tensors = weights
        self.kept = kept
        self.packed: dict[str, int] = earlier.packed if earlier else {}
        self.vectors: dict[str, int] = earlier.vectors if earlier else {}
        self.buffers: dict[int, int] = {}  # by id of a value that is still read
        self.packed_values: dict[tuple[int, tuple[int, ...]], Value] = {}
        self.angles: dict[tuple[int, int], int] = {}
        """Buffers by id and head size; no other value reuses them."""
        self.free: dict[_Shape, list[int]] = {}
        if earlier:
            # Packed buffers are not shared: they would be packed for the readers of both programs.
            self.free = {
                shape: list(buffers) for shape, buffers in earlier.free.items() if not shape[2]
            }
        self.offset_products = _offset_products(program)
        self.readers = self._readers()

    def lower(self) -> None:
        new_bytes = {
            weight.name: weight.nbytes
            for op in self.program.ops
            for weight in op.matrices()
            if weight.name not in self.packed
        }
        self.plan.reserve_weights(sum(new_bytes.values()))
        last_use = self.program.last_use()
        for index, op in enumerate(self.program.ops):
            LOWER[type(op)](self, op)
            for value in {v.id: v for v in op.inputs()}.values():
                if last_use[value.id] == index:
                    self.release(value)

    def buffer(self, value: Value) -> int:
        if value.id not in self.buffers:
            if free := self.free.get(self.shape(value)):
                self.buffers[value.id] = free.pop()
            else:
                buffer = self.plan.add_buffer(value.width, value.rows, value.packed)
                self.buffers[value.id] = buffer
        return self.buffers[value.id]

    def shape(self, value: Value) -> _Shape:
        """The properties that values must share to use one buffer."""
        readers = self.readers.get(value.id, frozenset()) if value.packed else frozenset()
        return value.width, value.rows, value.packed, readers

    def release(self, value: Value) -> None:
        copies = [copy for (id, _), copy in self.packed_values.items() if id == value.id]
        for unused in (value, *copies):
            if unused.id in self.buffers and unused.id not in self.kept:
                self.free.setdefault(self.shape(unused), []).append(self.buffers.pop(unused.id))

    def write(self, out: Value, lower: Callable[[int], None], packs_groups: bool = False) -> None:
        """Lower an op that writes float32, and pack its result if the value is packed.

        `packs_groups`: the op can pack groups of columns.
        """
        has_row_scales = any(read.needs_rows_in_int8 for read, _ in self.readers.get(out.id, ()))
        if not out.packed or (packs_groups and not has_row_scales):
            return lower(self.buffer(out))
        unpacked = replace(out, id=-1, packed=False)
        lower(self.buffer(unpacked))
        self.plan.pack(self.buffer(out), self.buffer(unpacked))
        self.release(unpacked)
        return None

    def packed_input(self, x: Value, weight: Weight) -> int:
        if x.packed:
            return self.buffer(x)
        order = column_order(self.tensors[weight.name])
        packed = self.packed_values.setdefault(
            (x.id, order), replace(x, id=-2 - len(self.packed_values), packed=True)
        )
        if packed.id not in self.buffers:
            self.readers[packed.id] = self.readers[x.id]
            self.plan.pack(self.buffer(packed), self.buffer(x), list(order))
        return self.buffers[packed.id]

    def weight(self, weight: Weight) -> int:
        if weight.name not in self.packed:
            self.packed[weight.name] = add_weight(self.plan, self.tensors[weight.name])
        return self.packed[weight.name]

    def weight_pair(self, a: Weight, b: Weight) -> tuple[int, int]:
        """Two matrices, packed together because a kernel alternates between them."""
        if not {a.name, b.name} & self.packed.keys() and a != b:
            self.packed[a.name], self.packed[b.name] = add_weight_pair(
                self.plan, self.tensors[a.name], self.tensors[b.name]
            )
        return self.weight(a), self.weight(b)

    def vector(self, weight: Weight | None) -> int:
        if weight is None:
            return -1
        if weight.name not in self.vectors:
            self.vectors[weight.name] = self.plan.add_vector(
                self.tensors[weight.name].dequantise().reshape(-1)
            )
        return self.vectors[weight.name]

    def reads_offset(self, op: Op) -> bool:
        """Whether an op reads int8 activations with an offset, which uses their whole range.

        Queries, keys, values and logits cause half of the KL divergence of int8 activations, at a
        sixth of a prefill's arithmetic.
        """
        return isinstance(op, ops.QkvRopeWrite) or (
            isinstance(op, ops.Linear)
            and op.density == 1  # a 0 has the code 0 only without an offset
            and op.out.id in self.offset_products
        )

    def _readers(self) -> dict[int, _Readers]:
        readers: dict[int, _Readers] = {}
        for op in self.program.ops:
            if isinstance(op, LINEAR_OPS):
                read = frozenset(
                    (self.tensors[w.name].format, self.reads_offset(op)) for w in op.matrices()
                )
                readers[op.x.id] = readers.get(op.x.id, frozenset()) | read
        return readers


def _offset_products(program: Program) -> set[int]:
    """Ids of values that become queries, keys, values or logits without another product."""
    found = {program.logits.id} if program.logits else set()
    for op in reversed(program.ops):
        if isinstance(op, ops.Attention):
            found.add(op.q.id)
        elif isinstance(op, ops.KvWrite):
            found |= {value.id for value in (op.k, op.v) if value}
        elif isinstance(op, _TRANSPARENT_OPS) and op.out.id in found:
            found |= {value.id for value in op.inputs()}
    return found


def _embed(lo: Lowering, op: ops.Embed) -> None:
    lo.plan.embed(lo.buffer(op.out), lo.weight(op.weight))


def _embed_part(lo: Lowering, op: collective.EmbedPart) -> None:
    lo.plan.embed(lo.buffer(op.out), lo.weight(op.weight), op.first, op.vocab)


def _take_columns(lo: Lowering, op: collective.TakeColumns) -> None:
    lo.write(op.out, lambda out: lo.plan.take_columns(out, lo.buffer(op.x), op.first))


def _collective(lo: Lowering, op: collective.Collective) -> None:
    assert lo.process_group, "a program with collectives needs a process group"
    exchange = partial(lo.process_group.run, op)
    inputs = [lo.buffer(x) for x in op.inputs()]
    if out := op.output():
        lo.write(out, lambda to: lo.plan.exchange(op.name, to, inputs, exchange))
    else:
        lo.plan.exchange(op.name, -1, inputs, exchange)


def _embed_position(lo: Lowering, op: ops.EmbedPosition) -> None:
    lo.plan.embed_position(lo.buffer(op.out), lo.weight(op.weight))


def _input(lo: Lowering, op: ops.Input) -> None:
    lo.plan.input(lo.buffer(op.out))


def _rope_angles(lo: Lowering, op: ops.RopeAngles) -> None:
    readers = (
        r
        for r in lo.program.ops
        if isinstance(r, ops.Rope | ops.QkvRopeWrite) and r.angles == op.out
    )
    for head_dim in dict.fromkeys(reader.head_dim for reader in readers):
        lo.angles[op.out.id, head_dim] = lo.plan.rope_angles(
            list(op.inverse_frequencies), op.scale, head_dim
        )


def _norm(lo: Lowering, op: ops.Norm) -> None:
    share = (op.rank, op.ranks) if isinstance(op, collective.NormShare) else ()
    lo.plan.norm(
        lo.buffer(op.out),
        lo.buffer(op.x),
        lo.vector(op.weight),
        lo.vector(op.bias),
        op.kind,
        op.size,
        op.eps,
        *share,
    )


def _linear(lo: Lowering, op: ops.Linear) -> None:
    if op.density < 1:
        return _sparse_linear(lo, op, -1)
    x, weight, bias = lo.packed_input(op.x, op.weight), lo.weight(op.weight), lo.vector(op.bias)
    lo.write(op.out, lambda out: lo.plan.linear(out, x, weight, bias, -1, lo.reads_offset(op)))
    return None


def _sparse_linear(lo: Lowering, op: ops.Linear | ops.LinearAdd, residual: int) -> None:
    x, weight, bias = lo.packed_input(op.x, op.weight), lo.weight(op.weight), lo.vector(op.bias)
    lo.write(op.out, lambda out: lo.plan.sparse_linear(out, x, weight, bias, residual))


def _threshold(lo: Lowering, op: ops.Threshold) -> None:
    lo.write(op.out, lambda out: lo.plan.threshold(out, lo.buffer(op.x), op.least))


def _linear_add(lo: Lowering, op: ops.LinearAdd) -> None:
    if op.density < 1:
        return _sparse_linear(lo, op, lo.buffer(op.residual))
    x, weight, bias, residual = (
        lo.packed_input(op.x, op.weight),
        lo.weight(op.weight),
        lo.vector(op.bias),
        lo.buffer(op.residual),
    )
    lo.write(op.out, lambda out: lo.plan.linear(out, x, weight, bias, residual, False))
    return None


def _linear_activate(lo: Lowering, op: ops.LinearActivate) -> None:
    x, weight, bias = lo.packed_input(op.x, op.weight), lo.weight(op.weight), lo.vector(op.bias)
    lo.write(
        op.out,
        lambda out: lo.plan.linear_activate(out, x, weight, bias, op.activation),
        packs_groups=True,
    )


def _head_linear(lo: Lowering, op: ops.HeadLinear) -> None:
    x, heads = lo.buffer(op.x), [lo.weight(weight) for weight in op.heads]
    lo.write(op.out, lambda out: lo.plan.head_linear(out, x, heads))


def _concat_heads(lo: Lowering, op: ops.ConcatHeads) -> None:
    lo.plan.concat_heads(
        lo.buffer(op.out), lo.buffer(op.x), lo.buffer(op.y), op.num_heads, op.x_dim, op.y_dim
    )


def _rope(lo: Lowering, op: ops.Rope) -> None:
    lo.plan.rope(
        lo.buffer(op.out), lo.buffer(op.x), lo.angles[op.angles.id, op.head_dim], op.head_dim
    )


def _kv_write(lo: Lowering, op: ops.KvWrite) -> None:
    lo.plan.kv_write(lo.buffer(op.k), lo.buffer(op.v) if op.v else -1, lo.places[op.layer])


def _qkv_rope_write(lo: Lowering, op: ops.QkvRopeWrite) -> None:
    angles = lo.angles[op.angles.id, op.head_dim]
    weights = [lo.weight(w) for w in (op.q, op.k, op.v)]
    biases = [lo.vector(b) for b in (op.q_bias, op.k_bias, op.v_bias)]
    lo.write(
        op.out,
        lambda out: lo.plan.qkv_rope_write(
            out, lo.packed_input(op.x, op.q), angles, weights, biases, lo.places[op.layer]
        ),
    )


def _glu_linear(lo: Lowering, op: ops.GluLinear) -> None:
    gate, up = lo.weight_pair(op.gate, op.up)
    x, gate_bias, up_bias = (
        lo.packed_input(op.x, op.gate),
        lo.vector(op.gate_bias),
        lo.vector(op.up_bias),
    )
    lo.write(
        op.out,
        lambda out: lo.plan.glu_linear(
            out, x, gate, up, gate_bias, up_bias, op.activation, op.density < 1
        ),
        packs_groups=True,
    )


def _attention(lo: Lowering, op: ops.Attention) -> None:
    def lower(out: int) -> None:
        q, place, sinks = lo.buffer(op.q), lo.places[op.layer], lo.vector(op.sinks)
        pairs = _key_bias_pairs(lo, op) if op.key_bias else []
        lo.plan.attention(
            out,
            q,
            place,
            op.num_heads,
            op.value_dim,
            op.scale,
            op.softcap,
            op.slopes,
            sinks,
            pairs,
            op.top_blocks,
        )

    lo.write(op.out, lower, packs_groups=op.value_dim % GROUP == 0)  # a head is then whole groups


def _key_bias_pairs(lo: Lowering, op: ops.Attention) -> list[tuple[int, int, float, float, float]]:
    """(KV head, number of the key, frequency, biases) of the pairs that are not zero."""
    assert op.key_bias
    heads = lo.tensors[op.key_bias.name].dequantise().reshape(op.num_kv_heads, op.head_dim)
    return [(head, *pair) for head, bias in enumerate(heads) for pair in op.key_bias_pairs(bias)]


def _exit_choice(lo: Lowering, op: ops.ExitChoice) -> None:
    late = -1 if op.late is None else lo.buffer(op.late)
    lo.plan.exit_choice(lo.buffer(op.out), lo.buffer(op.early), late, op.min_margin)


def _gather_rows(lo: Lowering, op: ops.GatherRows) -> None:
    lo.plan.gather_rows(lo.buffer(op.out), lo.buffer(op.x))


def _add(lo: Lowering, op: ops.Add) -> None:
    lo.plan.add(lo.buffer(op.out), lo.buffer(op.x), lo.buffer(op.y))


def _glu(lo: Lowering, op: ops.Glu) -> None:
    lo.plan.glu(lo.buffer(op.out), lo.buffer(op.gate), lo.buffer(op.up), op.activation)


def _activate(lo: Lowering, op: ops.Activate) -> None:
    lo.plan.activate(lo.buffer(op.out), lo.buffer(op.x), op.activation)


def _scale(lo: Lowering, op: ops.Scale) -> None:
    lo.plan.scale(lo.buffer(op.out), lo.buffer(op.x), op.factor)


def _soft_cap(lo: Lowering, op: ops.SoftCap) -> None:
    lo.plan.soft_cap(lo.buffer(op.out), lo.buffer(op.x), op.cap)


def _gate_rows(lo: Lowering, op: moe.GateRows) -> None:
    lo.plan.gate_rows(lo.buffer(op.out), lo.buffer(op.x), lo.buffer(op.gate))


def _route(lo: Lowering, op: moe.Route) -> None:
    how = (
        op.top_k,
        op.scoring,
        op.normalised,
        op.factor,
        (op.groups, op.top_groups),
        lo.vector(op.bias),
    )
    lo.plan.route(lo.buffer(op.out), lo.buffer(op.x), *how)


def _experts(lo: Lowering, op: moe.Experts) -> None:
    pairs = [lo.weight_pair(gate, up) for gate, up in zip(op.gate, op.up, strict=True)]
    weights = (
        [gate for gate, _ in pairs],
        [up for _, up in pairs],
        [lo.weight(down) for down in op.down],
    )
    gate_bias, up_bias, down_bias = (
        [lo.vector(bias) for bias in biases] for biases in (op.gate_bias, op.up_bias, op.down_bias)
    )
    reads = (
        lo.buffer(op.x),
        lo.buffer(op.routing),
        weights,
        (gate_bias, up_bias, down_bias),
        op.activation,
    )
    part = (op.first, op.num_experts) if isinstance(op, collective.ExpertPart) else ()
    with named_in_errors(op.gate[0].name):
        lo.write(op.out, lambda out: lo.plan.experts(out, *reads, *part))


def _combine(lo: Lowering, op: collective.Combine) -> None:
    lo.write(op.out, lambda out: lo.plan.combine(out, lo.buffer(op.x), lo.buffer(op.routing)))


LOWER: dict[type[Op], Callable[[Lowering, Any], None]] = {
    ops.Embed: _embed,
    ops.EmbedPosition: _embed_position,
    ops.Input: _input,
    ops.RopeAngles: _rope_angles,
    ops.Norm: _norm,
    ops.Linear: _linear,
    ops.LinearActivate: _linear_activate,
    ops.Threshold: _threshold,
    ops.LinearAdd: _linear_add,
    ops.HeadLinear: _head_linear,
    ops.ConcatHeads: _concat_heads,
    ops.Rope: _rope,
    ops.KvWrite: _kv_write,
    ops.QkvRopeWrite: _qkv_rope_write,
    ops.GluLinear: _glu_linear,
    ops.Attention: _attention,
    ops.ExitChoice: _exit_choice,
    ops.GatherRows: _gather_rows,
    ops.Add: _add,
    ops.Glu: _glu,
    ops.Activate: _activate,
    ops.Scale: _scale,
    ops.SoftCap: _soft_cap,
    moe.GateRows: _gate_rows,
    moe.Route: _route,
    moe.Experts: _experts,
    collective.ExpertPart: _experts,
    collective.Combine: _combine,
    collective.EmbedPart: _embed_part,
    collective.TakeColumns: _take_columns,
    collective.NormShare: _norm,
    **dict.fromkeys(collective.Collective.__subclasses__(), _collective),
}
