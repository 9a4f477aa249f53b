"""Joins neighbouring ops into fused ops, which compute the same numbers up to rounding.

* linear x 3 + rope x 2 + kv_write -> QkvRopeWrite
* linear x 2 + glu -> GluLinear
* linear + activate -> LinearActivate
* linear + add -> LinearAdd

Values that only linear ops read are marked as packed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from headrace.program.op import Op, Value
from headrace.program.ops import (
    Activate,
    Add,
    Attention,
    Glu,
    GluLinear,
    KvWrite,
    Linear,
    LinearActivate,
    LinearAdd,
    QkvRopeWrite,
    Rope,
)
from headrace.program.trace import Program

LINEAR_OPS = (Linear, LinearActivate, LinearAdd, QkvRopeWrite, GluLinear)


class _Rewrite(NamedTuple):
    op: Op
    fused: Op
    absorbed: list[Op]


def fuse(program: Program, unpacked: Collection[int] = ()) -> Program:
    """The program with fused ops and packed values; values with ids in `unpacked` stay float32."""
    ops = list(program.ops)
    for rule in (_fuse_qkv, _fuse_glu, _fuse_activate, _fuse_add):
        ops = _apply(rule, ops)
    results = {value.id for value in program.results}
    return replace(program, ops=tuple(_pack(ops, results | set(unpacked))))


class _Uses:
    def __init__(self, ops: list[Op]) -> None:
        self.writer = {out.id: op for op in ops if (out := op.output()) is not None}
        self.num_reads = Counter(value.id for op in ops for value in op.inputs())

    def sole_linear(self, value: Value) -> Linear | None:
        op = self.writer[value.id]
        return op if isinstance(op, Linear) and self.num_reads[value.id] == 1 else None

    def whole_linear(self, value: Value) -> Linear | None:
        """The same, unless it may leave columns of its weight unread."""
        op = self.sole_linear(value)
        return op if op and op.density == 1 else None

    def sole_rope(self, value: Value) -> tuple[Rope, Linear] | None:
        op = self.writer[value.id]
        if not isinstance(op, Rope) or self.num_reads[value.id] != 1:
            return None
        linear = self.whole_linear(op.x)
        return (op, linear) if linear else None


_Rule = Callable[[list[Op], _Uses], Iterator[_Rewrite]]


def _apply(rule: _Rule, ops: list[Op]) -> list[Op]:
    rewrites = list(rule(ops, _Uses(ops)))
    fused = {id(rewrite.op): rewrite.fused for rewrite in rewrites}
    absorbed = {id(op) for rewrite in rewrites for op in rewrite.absorbed}
    return [fused.get(id(op), op) for op in ops if id(op) not in absorbed]


def _fuse_qkv(ops: list[Op], uses: _Uses) -> Iterator[_Rewrite]:
    attention_of_layer = {op.layer: op for op in ops if isinstance(op, Attention)}
    for write in ops:
        if not isinstance(write, KvWrite) or write.v is None:
            continue
        attention = attention_of_layer.get(write.layer)
        if attention is None:
            continue
        q, k, v = uses.sole_rope(attention.q), uses.sole_rope(write.k), uses.whole_linear(write.v)
        if not (q and k and v):
            continue

        (q_rope, q_linear), (k_rope, k_linear) = q, k
        has_one_input = q_linear.x == k_linear.x == v.x and q_rope.angles == k_rope.angles
        head_dims = {q_rope.head_dim, k_rope.head_dim, attention.head_dim, attention.value_dim}
        if has_one_input and len(head_dims) == 1:
            fused = QkvRopeWrite(
                out=q_rope.out,
                x=v.x,
                angles=q_rope.angles,
                q=q_linear.weight,
                k=k_linear.weight,
                v=v.weight,
                q_bias=q_linear.bias,
                k_bias=k_linear.bias,
                v_bias=v.bias,
                layer=write.layer,
                head_dim=q_rope.head_dim,
            )
            yield _Rewrite(write, fused, [*q, *k, v])


def _fuse_glu(ops: list[Op], uses: _Uses) -> Iterator[_Rewrite]:
    for op in ops:
        if not isinstance(op, Glu):
            continue
        gate, up = uses.whole_linear(op.gate), uses.whole_linear(op.up)
        if gate and up and gate.x == up.x:
            fused = GluLinear(
                out=op.out,
                x=gate.x,
                gate=gate.weight,
                up=up.weight,
                activation=op.activation,
                gate_bias=gate.bias,
                up_bias=up.bias,
                density=op.density,
            )
            yield _Rewrite(op, fused, [gate, up])


def _fuse_activate(ops: list[Op], uses: _Uses) -> Iterator[_Rewrite]:
    for op in ops:
        if isinstance(op, Activate) and (linear := uses.whole_linear(op.x)):
            fused = LinearActivate(
                out=op.out,
                x=linear.x,
                weight=linear.weight,
                activation=op.activation,
                bias=linear.bias,
            )
            yield _Rewrite(op, fused, [linear])


def _fuse_add(ops: list[Op], uses: _Uses) -> Iterator[_Rewrite]:
    for op in ops:
        if not isinstance(op, Add):
            continue
        for residual, y in ((op.x, op.y), (op.y, op.x)):
            if linear := uses.sole_linear(y):
                fused = LinearAdd(
                    out=op.out,
                    x=linear.x,
                    residual=residual,
                    weight=linear.weight,
                    bias=linear.bias,
                    density=linear.density,
                )
                yield _Rewrite(op, fused, [linear])
                break


def _pack(ops: list[Op], unpacked: set[int]) -> list[Op]:
    num_reads = _Uses(ops).num_reads
    num_linear_reads = Counter(op.x.id for op in ops if isinstance(op, LINEAR_OPS))
    packed = {
        value
        for value, reads in num_linear_reads.items()
        if num_reads[value] == reads and value not in unpacked
    }

    def mark(op: Op) -> Op:
        values = {
            name: replace(value, packed=True)
            for name, value in vars(op).items()
            if isinstance(value, Value) and value.id in packed
        }
        return replace(op, **values) if values else op

    return [mark(op) for op in ops]
