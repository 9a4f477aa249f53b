"""Equivalent scalings: the columns of matrices times factors, and what they read divided by these
where it is made.

The model stays the same function, while its columns become easier to quantise (SmoothQuant, Xiao et
al. 2022; AWQ, Lin et al. 2023). What makes a value takes the division in: a norm with its weight
and bias; a gated unit with the rows of `up`; relu with those of the matrix before it; attention
with those of `v`, where the query heads of a KV head share their factors.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headrace.program.moe import Experts
from headrace.program.op import Op, Value
from headrace.program.ops import Activate, Attention, GatherRows, Glu, KvWrite, Linear, Norm
from headrace.program.trace import Program
from headrace.quant import dequantise as dq
from headrace.quant.formats import Format, StoredTensor, TensorPart
from headrace.record import frozen

Floats = NDArray[np.float32]


@frozen(eq=False)
class ScalingGroup:
    """A value whose columns may be divided by positive factors, and all tensors that change with
    it.
    """

    readers: tuple[str, ...]
    """Matrices whose columns are multiplied, those of routers and experts among them."""
    makers: tuple[str, ...]
    """Matrices whose rows are divided, and vectors whose numbers are; there are as many as factors.
    """
    columns: NDArray[np.int64]  # [columns of the value]
    """The number of each column's factor."""


class Scalings:
    """Factors of the rows and of the columns of tensors, by name. Without any all tensors are as
    they were.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Floats] = {}
        self.columns: dict[str, Floats] = {}

    def add(self, group: ScalingGroup, factors: Floats) -> None:
        """Divide the columns of a group's value by positive factors."""
        for name in group.readers:
            self.columns[name] = factors[group.columns]
        for name in group.makers:
            self.rows[name] = np.float32(1) / factors

    def of(self, tensor: StoredTensor) -> StoredTensor:
        """The tensor with its factors, which are applied whenever some of its rows are
        dequantised.
        """
        rows, columns = self.rows.get(tensor.name), self.columns.get(tensor.name)
        if rows is None and columns is None:
            return tensor
        assert not tensor.parts.keys() & _FACTORS.keys(), f"{tensor.name} is scaled already"
        if len(tensor.shape) == 1:
            rows, columns = None, rows
        stored = np.ones(len(tensor.parts["codes"]), np.float32)
        stored[slice(None) if tensor.row_order is None else tensor.row_order] = (
            1 if rows is None else rows
        )
        parts = {
            **tensor.parts,
            "row_factors": stored,
            "column_factors": np.ones(tensor.cols, np.float32) if columns is None else columns,
        }
        return StoredTensor(
            tensor.name, _scaled(tensor.format), tensor.shape, parts, tensor.row_order
        )

    def applied(
        self, tensors: Mapping[str, StoredTensor], lazily: Collection[str]
    ) -> dict[str, StoredTensor]:
        """All tensors with their factors: those `lazily` that are to be quantised, the others that
        have any in float32.
        """
        result = dict(tensors)
        for name in self.rows.keys() | self.columns.keys():
            scaled = self.of(tensors[name])
            result[name] = (
                scaled if name in lazily else StoredTensor.from_floats(name, scaled.dequantise())
            )
        return result


def scaling_groups(program: Program, names: Collection[str]) -> list[ScalingGroup]:
    """The values of a traced program that can be scaled and that some of the named matrices read,
    in the order of the program.

    A value is left out where anything but linear ops and experts reads it, or where a tensor has
    another use besides.
    """
    flow = _Flow(program)
    uses = Counter(weight.name for op in program.ops for weight in op.weights())
    groups: list[ScalingGroup] = []
    for value, ops in flow.readers.items():
        group = flow.group(value, ops)
        if (
            group
            and any(name in names for name in group.readers)
            and all(uses[name] == 1 for name in (*group.readers, *group.makers))
        ):
            groups.append(group)
    return groups


def sources(program: Program) -> dict[int, Value]:
    """By id, the value that each has its rows from: what they were gathered from, or itself."""
    found: dict[int, Value] = {}
    for op in program.ops:
        if out := op.output():
            found[out.id] = found[op.x.id] if isinstance(op, GatherRows) else out
    return found


class _Flow:
    """What writes and what reads the values of a program; gathering rows is neither."""

    def __init__(self, program: Program) -> None:
        self._writer = {out.id: op for op in program.ops if (out := op.output())}
        self._attention = Counter(op.layer for op in program.ops if isinstance(op, Attention))
        self._kv_writes = {op.layer: op for op in program.ops if isinstance(op, KvWrite)}
        self.readers = defaultdict[int, list[Op]](list)
        source = sources(program)
        for op in program.ops:
            for value in op.inputs() if not isinstance(op, GatherRows) else []:
                self.readers[source[value.id].id].append(op)

    def group(self, value: int, ops: list[Op]) -> ScalingGroup | None:
        """The group of a value and all ops that read it; None where one of these cannot be scaled,
        or what makes it cannot.
        """
        made = self._made(self._writer[value])
        readers: list[str] = []
        for op in ops:
            if isinstance(op, Linear):
                readers.append(op.weight.name)
            elif isinstance(op, Experts):
                readers += [weight.name for weight in (*op.gate, *op.up)]
            else:
                return None
        return ScalingGroup(tuple(readers), *made) if made else None

    def _made(self, op: Op) -> tuple[tuple[str, ...], NDArray[np.int64]] | None:
        """The tensors that the columns of an op's result are proportional to, and which entry of
        these each column goes with.
        """
        if isinstance(op, Norm) and op.weight.cols == op.x.width:
            return tuple(weight.name for weight in op.vectors()), np.arange(op.x.width)
        if isinstance(op, Glu) and op.activation != "clamped_swiglu":
            return self._rows(op.up)
        if isinstance(op, Activate) and op.activation == "relu":
            return self._rows(op.x)
        if (
            isinstance(op, Attention)
            and self._attention[op.layer] == 1
            and (v := self._kv_writes[op.layer].v)
            and (rows := self._rows(v))
        ):
            heads = rows[1].reshape(op.num_kv_heads, 1, op.value_dim)
            return rows[0], np.repeat(heads, op.num_heads // op.num_kv_heads, axis=1).reshape(-1)
        return None

    def _rows(self, value: Value) -> tuple[tuple[str, ...], NDArray[np.int64]] | None:
        """The tensors of the linear op that makes a value, where it is read once."""
        op = self._writer[value.id]
        if not isinstance(op, Linear) or len(self.readers[value.id]) != 1:
            return None
        return tuple(weight.name for weight in op.weights()), np.arange(value.width)


_FACTORS = {"row_factors": TensorPart("f4"), "column_factors": TensorPart("f4", by_row=False)}


@cache
def _scaled(base: Format) -> Format:
    """A stored format with factors of rows and columns."""

    def values(of: dq.Parts, rows: dq.Rows) -> dq.Floats:
        found: dq.Floats = (
            base.values(of, rows) * of["row_factors"][rows][:, None] * of["column_factors"]
        )
        return found

    return Format(
        f"{base.name}, scaled", base.block, base.nbytes, values, {**base.parts, **_FACTORS}
    )
