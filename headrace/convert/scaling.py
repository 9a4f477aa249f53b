"""Multiplies columns of matrices, and divides their input by the factors.

The model's function stays, but it is easier to quantise (SmoothQuant, Xiao et al. 2022; AWQ,
Lin et al. 2023). The op before the matrices absorbs the division.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.program.moe import Experts
from headrace.program.op import Op, Value
from headrace.program.ops import Activate, Attention, GatherRows, Glu, KvWrite, Linear, Norm
from headrace.program.trace import Program
from headrace.quant import dequantise as dq
from headrace.quant.arrays import Floats
from headrace.quant.formats import Format, StoredTensor, TensorPart
from headrace.record import frozen


@frozen(eq=False)
class ScalingGroup:
    readers: tuple[str, ...]
    """Matrices whose columns are multiplied."""
    producers: tuple[str, ...]
    """Tensors whose rows or entries are divided."""
    columns: NDArray[np.int64]  # [columns of the value]
    """The index of each column's factor."""


class Scalings:
    def __init__(self) -> None:
        self.rows: dict[str, Floats] = {}
        self.columns: dict[str, Floats] = {}

    def add(self, group: ScalingGroup, factors: Floats) -> None:
        for name in group.readers:
            self.columns[name] = factors[group.columns]
        for name in group.producers:
            self.rows[name] = np.float32(1) / factors

    def apply(self, tensor: StoredTensor) -> StoredTensor:
        """Scale a tensor when its rows are dequantised."""
        rows, columns = self.rows.get(tensor.name), self.columns.get(tensor.name)
        if rows is None and columns is None:
            return tensor
        assert not tensor.parts.keys() & _FACTORS.keys(), f"{tensor.name} is scaled already"
        if len(tensor.shape) == 1:
            rows, columns = None, rows

        stored_rows = np.ones(len(tensor.parts["codes"]), np.float32)
        order = slice(None) if tensor.row_order is None else tensor.row_order
        stored_rows[order] = 1 if rows is None else rows
        if columns is None:
            columns = np.ones(tensor.cols, np.float32)
        return StoredTensor(
            name=tensor.name,
            format=_scaled(tensor.format),
            shape=tensor.shape,
            parts={**tensor.parts, "row_factors": stored_rows, "column_factors": columns},
            row_order=tensor.row_order,
        )

    def apply_all(
        self, tensors: Mapping[str, StoredTensor], lazy: Collection[str]
    ) -> dict[str, StoredTensor]:
        """Scale all tensors; those in `lazy` when they are read."""
        result = dict(tensors)
        for name in self.rows.keys() | self.columns.keys():
            scaled = self.apply(tensors[name])
            if name not in lazy:
                scaled = StoredTensor.from_floats(name, scaled.dequantise())
            result[name] = scaled
        return result


def scaling_groups(program: Program, names: Collection[str]) -> list[ScalingGroup]:
    """List the scalable values that the named matrices read.

    Other readers, and tensors with a second use, prevent scaling.
    """
    flow = _DataFlow(program)
    uses = Counter(weight.name for op in program.ops for weight in op.weights())
    groups: list[ScalingGroup] = []
    for value, ops in flow.readers.items():
        group = flow.group(value, ops)
        if (
            group
            and any(name in names for name in group.readers)
            and all(uses[name] == 1 for name in (*group.readers, *group.producers))
        ):
            groups.append(group)
    return groups


def gather_sources(program: Program) -> dict[int, Value]:
    sources: dict[int, Value] = {}
    for op in program.ops:
        if out := op.output():
            sources[out.id] = sources[op.x.id] if isinstance(op, GatherRows) else out
    return sources


class _Producers(NamedTuple):
    names: tuple[str, ...]
    entries: NDArray[np.int64]
    """The row or entry of each column [columns of the value]."""


class _DataFlow:
    def __init__(self, program: Program) -> None:
        self._writer = {out.id: op for op in program.ops if (out := op.output())}
        self._attention = Counter(op.layer for op in program.ops if isinstance(op, Attention))
        self._kv_writes = {op.layer: op for op in program.ops if isinstance(op, KvWrite)}
        self.readers = defaultdict[int, list[Op]](list)
        sources = gather_sources(program)
        for op in program.ops:
            for value in op.inputs() if not isinstance(op, GatherRows) else []:
                self.readers[sources[value.id].id].append(op)

    def group(self, value: int, ops: list[Op]) -> ScalingGroup | None:
        producers = self._producers(self._writer[value])
        readers: list[str] = []
        for op in ops:
            if isinstance(op, Linear):
                readers.append(op.weight.name)
            elif isinstance(op, Experts):
                readers += [weight.name for weight in (*op.gate, *op.up)]
            else:
                return None
        if producers is None:
            return None
        return ScalingGroup(tuple(readers), producers.names, producers.entries)

    def _producers(self, op: Op) -> _Producers | None:
        if isinstance(op, Norm) and op.weight.cols == op.x.width:
            names = tuple(weight.name for weight in op.vectors())
            return _Producers(names, np.arange(op.x.width))
        if isinstance(op, Glu) and op.activation != "clamped_swiglu":
            return self._linear_rows(op.up)
        if isinstance(op, Activate) and op.activation == "relu":
            return self._linear_rows(op.x)
        if (
            isinstance(op, Attention)
            and self._attention[op.layer] == 1
            and (v := self._kv_writes[op.layer].v)
            and (rows := self._linear_rows(v))
        ):
            heads = rows.entries.reshape(op.num_kv_heads, 1, op.value_dim)
            repeated = np.repeat(heads, op.num_heads // op.num_kv_heads, axis=1)
            return _Producers(rows.names, repeated.reshape(-1))
        return None

    def _linear_rows(self, value: Value) -> _Producers | None:
        op = self._writer[value.id]
        if not isinstance(op, Linear) or len(self.readers[value.id]) != 1:
            return None
        return _Producers(tuple(weight.name for weight in op.weights()), np.arange(value.width))


_FACTORS = {"row_factors": TensorPart("f4"), "column_factors": TensorPart("f4", by_row=False)}


@cache
def _scaled(base: Format) -> Format:

    def values(parts: dq.Parts, rows: dq.Rows) -> Floats:
        row_factors = parts["row_factors"][rows][:, None]
        result: Floats = base.values(parts, rows) * row_factors * parts["column_factors"]
        return result

    return Format(
        name=f"{base.name}, scaled",
        block=base.block,
        nbytes=base.nbytes,
        values=values,
        parts={**base.parts, **_FACTORS},
    )
