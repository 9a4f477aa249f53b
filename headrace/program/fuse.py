"""Rewrites neighbouring ops into fused ones. The result computes the same numbers up to rounding.

Four rules join ops: linear x 3 + rope x 2 + kv_write -> QkvRopeWrite; linear x 2 + glu ->
GluLinear; linear + activate -> LinearActivate; linear + add -> LinearAdd. Then every value that
only linear ops read becomes packed, so that norm, attention and glu write what the next kernel
reads.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
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
"""Ops that read their `x` through weights only."""


class _Rewrite(NamedTuple):
    """`new` takes the place of `at`, and the ops `absorbed` go."""

    at: Op
    new: Op
    absorbed: list[Op]


def fuse(program: Program, loose: Collection[int] = ()) -> Program:
    """The same program in fewer, larger ops; values that are to stay `loose`, by id, are not packed
    by the op that writes them.
    """
    ops = list(program.ops)
    for rule in (_qkv, _glu, _activate, _add):
        ops = _apply(ops, rule(ops, _Flow(ops)))
    return replace(
        program, ops=tuple(_pack(ops, {value.id for value in program.results} | set(loose)))
    )


class _Flow:
    """Which op writes a value, and how often it is read."""

    def __init__(self, ops: list[Op]) -> None:
        self.writer = {out.id: op for op in ops if (out := op.output()) is not None}
        self.reads = Counter(value.id for op in ops for value in op.inputs())

    def sole_linear(self, value: Value) -> Linear | None:
        """The linear op that writes a value which is read only once."""
        op = self.writer[value.id]
        return op if isinstance(op, Linear) and self.reads[value.id] == 1 else None

    def sole_rope(self, value: Value) -> tuple[Rope, Linear] | None:
        """The rope that writes a value which is read only once, and the linear op that the rope
        alone reads.
        """
        op = self.writer[value.id]
        if not isinstance(op, Rope) or self.reads[value.id] != 1:
            return None
        linear = self.sole_linear(op.x)
        return (op, linear) if linear else None


def _apply(ops: list[Op], rewrites: Iterable[_Rewrite]) -> list[Op]:
    found = list(rewrites)
    new = {id(r.at): r.new for r in found}
    gone = {id(op) for r in found for op in r.absorbed}
    return [new.get(id(op), op) for op in ops if id(op) not in gone]


def _qkv(ops: list[Op], flow: _Flow) -> Iterator[_Rewrite]:
    attention = {op.layer: op for op in ops if isinstance(op, Attention)}
    for write in ops:
        if (
            not isinstance(write, KvWrite)
            or not write.v
            or not (reader := attention.get(write.layer))
        ):
            continue
        q, k, v = flow.sole_rope(reader.q), flow.sole_rope(write.k), flow.sole_linear(write.v)
        if not (q and k and v):
            continue
        (q_rope, q_linear), (k_rope, k_linear) = q, k
        same_input = q_linear.x == k_linear.x == v.x and q_rope.angles == k_rope.angles
        if same_input and q_rope.head_dim == k_rope.head_dim == reader.head_dim == reader.value_dim:
            weights = (
                q_linear.weight,
                k_linear.weight,
                v.weight,
                q_linear.bias,
                k_linear.bias,
                v.bias,
            )
            fused = QkvRopeWrite(
                q_rope.out, v.x, q_rope.angles, *weights, write.layer, q_rope.head_dim
            )
            yield _Rewrite(write, fused, [*q, *k, v])


def _glu(ops: list[Op], flow: _Flow) -> Iterator[_Rewrite]:
    for op in ops:
        if (
            isinstance(op, Glu)
            and (gate := flow.sole_linear(op.gate))
            and (up := flow.sole_linear(op.up))
            and gate.x == up.x
        ):
            yield _Rewrite(
                op,
                GluLinear(
                    op.out, gate.x, gate.weight, up.weight, op.activation, gate.bias, up.bias
                ),
                [gate, up],
            )


def _activate(ops: list[Op], flow: _Flow) -> Iterator[_Rewrite]:
    for op in ops:
        if isinstance(op, Activate) and (linear := flow.sole_linear(op.x)):
            yield _Rewrite(
                op,
                LinearActivate(op.out, linear.x, linear.weight, op.activation, linear.bias),
                [linear],
            )


def _add(ops: list[Op], flow: _Flow) -> Iterator[_Rewrite]:
    for op in ops:
        if isinstance(op, Add):
            for residual, y in ((op.x, op.y), (op.y, op.x)):
                if linear := flow.sole_linear(y):
                    yield _Rewrite(
                        op,
                        LinearAdd(op.out, linear.x, residual, linear.weight, linear.bias),
                        [linear],
                    )
                    break


def _pack(ops: list[Op], results: set[int]) -> list[Op]:
    """Marks as packed every value that is read only as the `x` of linear ops; `results` are read in
    other ways too.
    """
    as_x = Counter(op.x.id for op in ops if isinstance(op, LINEAR_OPS))
    reads = _Flow(ops).reads
    packed = {value for value, n in as_x.items() if reads[value] == n and value not in results}

    def mark(op: Op) -> Op:
        values = {
            name: v for name, v in vars(op).items() if isinstance(v, Value) and v.id in packed
        }
        return (
            replace(op, **{name: replace(v, packed=True) for name, v in values.items()})
            if values
            else op
        )

    return [mark(op) for op in ops]
