"""Tensor parallelism: every matrix split by the rows of its output, whose inputs are gathered, so
that no sum crosses ranks.

Megatron-LM (Shoeybi et al. 2019) splits every second matrix by its columns and adds partial sums
up, which rounds in another order for each number of ranks. Here a product is computed whole where
it is computed, and ranks give the bits of one.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any, cast

import numpy as np

from headrace.parallel.shares import ROWS, even, kv_heads, query_heads, times
from headrace.program import ops
from headrace.program.collective import (
    AllGather,
    Columns,
    ColumnsToRows,
    Combine,
    EmbedPart,
    ExpertPart,
    GatherShares,
    NormShare,
    OwnedExperts,
    OwnedRows,
    TakeColumns,
)
from headrace.program.kv import KvGroup
from headrace.program.moe import Experts, GateRows, Route
from headrace.program.op import Op, Value, Weight
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

Parts = tuple[Columns, ...]
"""The columns of a value that each rank has."""


def share(weight: Weight, rows: Columns) -> Weight:
    """Some rows of a matrix, or some numbers of a vector, as a weight of its own."""
    first, last = rows
    name, count = f"{weight.name}[{first}:{last}]", last - first
    if weight.rows == 1:
        return replace(weight, name=name, cols=count, nbytes=weight.nbytes // weight.cols * count)
    return replace(weight, name=name, rows=count, nbytes=weight.nbytes // weight.rows * count)


def share_of(tensors: Mapping[str, StoredTensor], weight: Weight) -> StoredTensor:
    """The stored tensor of a weight that `share` made, or of one that is whole: a view."""
    name, bracket, rows = weight.name.partition("[")
    tensor = tensors[name]
    if not bracket:
        return tensor
    first, last = map(int, rows.rstrip("]").split(":"))
    if tensor.rows == 1:
        return StoredTensor.from_floats(weight.name, tensor.dequantise().reshape(-1)[first:last])
    order = np.arange(tensor.rows) if tensor.row_order is None else tensor.row_order
    return tensor.take(weight.name, order[first:last])


class TensorParallel:
    """Rewrites a program for one rank of several. Ids of values that are in both are the same."""

    def __init__(
        self,
        program: Program,
        rank: int,
        ranks: int,
        shares_experts: bool = True,
        sequence: bool = False,
    ) -> None:
        """`shares_experts`: whether each rank has some of the experts, or all of them; `sequence`:
        whether what layers add up is split by columns, and each rank norms some of the rows.
        """
        self.rank, self.ranks, self._shares_experts, self._sequence = (
            rank,
            ranks,
            shares_experts,
            sequence,
        )
        self._program = program
        self._ids = count(1 + max(out.id for op in program.ops if (out := op.output())))
        self._writers = {out.id: op for op in program.ops if (out := op.output())}
        self._wanted: dict[int, Parts] = {}
        self._parts: dict[int, Parts] = {}
        self._values: dict[int, Value] = {}
        self._gathered: dict[int, Value] = {}
        self._ops: list[Op] = []

    def rewritten(self) -> Program:
        """The program of this rank; what it gives back is whole."""
        for op in reversed(self._program.ops):
            self._want(op)
        for op in self._program.ops:
            self._rewrite(op)
        new = {value.id: self._whole(value) for value in self._program.results}
        program = self._program
        return replace(
            program,
            ops=tuple(self._ops),
            logits=program.logits and new[program.logits.id],
            hidden=program.hidden and new[program.hidden.id],
            pooled=program.pooled and new[program.pooled.id],
            shared_kv_groups=tuple(self._own(group) for group in program.kv_groups),
        )

    def _own(self, group: KvGroup) -> KvGroup:
        first, last = kv_heads(group.layout.num_heads, self.ranks)[self.rank]
        return replace(group, layout=replace(group.layout, num_heads=last - first))

    def _want(self, op: Op) -> None:
        """What heads are on this rank says which columns of the values before them are wanted
        there.
        """
        if isinstance(op, ops.Attention):
            self._wanted[op.q.id] = times(
                query_heads(op.num_heads, op.num_kv_heads, self.ranks), op.head_dim
            )
            for write in self._program.ops:
                if isinstance(write, ops.KvWrite) and write.layer == op.layer:
                    heads = kv_heads(op.num_kv_heads, self.ranks)
                    for value in (write.k, write.v):
                        if value:
                            self._wanted[value.id] = times(heads, value.width // op.num_kv_heads)
            return
        out = op.output()
        parts = self._wanted.get(out.id) if out else None
        if not parts or not out:
            return
        if isinstance(op, ops.Rope | ops.Scale | ops.SoftCap | ops.Activate) or (
            isinstance(op, ops.Norm) and op.size < op.x.width
        ):
            self._wanted[op.x.id] = parts
        elif isinstance(op, ops.ConcatHeads):
            size = op.x_dim + op.y_dim
            heads = tuple((first // size, last // size) for first, last in parts)
            for value, dim in ((op.x, op.x_dim), (op.y, op.y_dim)):
                if value.width == dim * op.num_heads and op.num_heads > 1:
                    self._wanted[value.id] = times(heads, dim)
        elif isinstance(op, ops.HeadLinear) and op.x.width == op.heads[0].cols * len(op.heads):
            rows = op.heads[0].rows
            self._wanted[op.x.id] = tuple(
                (first // rows * op.heads[0].cols, last // rows * op.heads[0].cols)
                for first, last in parts
            )

    def _rewrite(self, op: Op) -> None:
        match op:
            case ops.Embed():
                parts = self._rows(op.weight)
                first, last = parts[self.rank]
                part = self._new(op.out.width, op.out)
                self._ops.append(
                    EmbedPart(part, share(op.weight, (first, last)), first, op.weight.rows)
                )
                self._ops.append(OwnedRows(op.out, part, self.rank, parts))
            case Experts() if self._shares_experts and len(op.gate) >= self.ranks:
                self._experts(op)
            case ops.Linear():
                self._linear(op)
            case ops.Attention():
                self._attention(op)
            case ops.KvWrite():
                self._ops.append(
                    replace(
                        op,
                        k=self._part(op.k, self._wanted[op.k.id]),
                        v=op.v and self._part(op.v, self._wanted[op.v.id]),
                    )
                )
            case ops.HeadLinear():
                self._head_linear(op)
            case ops.ConcatHeads():
                self._concat_heads(op)
            case ops.Glu() if self._parts.get(op.gate.id) == self._parts.get(op.up.id):
                self._follow(op, op.gate)
            case ops.Rope() if (
                op.out.id not in self._wanted
            ):  # a part that ends within a head is of no use
                self._ops.append(self._with_whole_inputs(op))
            case ops.Rope() | ops.Scale() | ops.SoftCap() | ops.Activate():
                self._follow(op, op.x)
            case ops.Norm() if op.size < op.x.width and op.x.id in self._parts:
                self._norm(op)
            case ops.Add() if self._sequence and (op.x.id in self._parts or op.y.id in self._parts):
                self._add(op)
            case ops.GatherRows() if self._sequence:
                self._follow(op, op.x)
            case ops.Norm() if self._sequence and op.x.id in self._parts and op.x.rows == "step":
                self._norm_rows(op)
            case _:
                self._ops.append(self._with_whole_inputs(op))

    def _rows(self, weight: Weight) -> Parts:
        return even(weight.rows, self.ranks, ROWS if weight.rows >= ROWS * self.ranks else 1)

    def _linear(self, op: ops.Linear) -> None:
        parts = self._wanted.get(op.out.id)
        if parts is None and (self._decides(op.out) or op.weight.rows < self.ranks):
            self._ops.append(self._with_whole_inputs(op))
            return
        parts = parts or self._rows(op.weight)
        rows = parts[self.rank]
        out = self._split(op.out, parts)
        self._ops.append(
            ops.Linear(
                out, self._whole(op.x), share(op.weight, rows), op.bias and share(op.bias, rows)
            )
        )

    def _experts(self, op: Experts) -> None:
        """Whole experts: each is computed where it is, and what comes of them is added up in the
        order of the routing.
        """
        parts = even(len(op.gate), self.ranks)
        first, last = parts[self.rank]
        x, routing = self._whole(op.x), self._whole(op.routing)
        part = self._new(op.top_k * op.out.width, op.out)
        own = {
            name: getattr(op, name)[first:last]
            for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        }
        each = self._new(part.width, op.out)
        self._ops.append(
            ExpertPart(
                out=part,
                x=x,
                routing=routing,
                activation=op.activation,
                **own,
                first=first,
                num_experts=len(op.gate),
            )
        )
        self._ops.append(
            OwnedExperts(out=each, x=part, routing=routing, rank=self.rank, parts=parts)
        )
        self._ops.append(Combine(op.out, each, routing))

    def _decides(self, value: Value) -> bool:
        """Whether experts or gates of whole rows are chosen by it: few numbers, which each rank
        computes for itself.
        """
        return any(
            (isinstance(op, Route) and op.x == value)
            or (isinstance(op, GateRows) and op.gate == value)
            for op in self._program.ops
        )

    def _attention(self, op: ops.Attention) -> None:
        heads = query_heads(op.num_heads, op.num_kv_heads, self.ranks)
        (first, last), kv = heads[self.rank], kv_heads(op.num_kv_heads, self.ranks)[self.rank]
        q = self._part(op.q, self._wanted[op.q.id])
        out = self._split(op.out, times(heads, op.value_dim))
        slopes, sinks = op.slopes[first:last], op.sinks and share(op.sinks, (first, last))
        self._ops.append(
            replace(
                op,
                out=out,
                q=q,
                num_heads=last - first,
                num_kv_heads=kv[1] - kv[0],
                slopes=slopes,
                sinks=sinks,
            )
        )

    def _head_linear(self, op: ops.HeadLinear) -> None:
        rows, cols = op.heads[0].rows, op.heads[0].cols
        shared = op.x.width == cols and len(op.heads) > 1
        parts = self._wanted.get(op.out.id)
        if parts is None and not shared and op.x.id in self._parts:
            parts = tuple(
                (first // cols * rows, last // cols * rows) for first, last in self._parts[op.x.id]
            )
        if parts is None:
            self._ops.append(self._with_whole_inputs(op))
            return
        first, last = (column // rows for column in parts[self.rank])
        x = (
            self._whole(op.x)
            if shared
            else self._part(op.x, tuple((a // rows * cols, b // rows * cols) for a, b in parts))
        )
        self._ops.append(ops.HeadLinear(self._split(op.out, parts), x, op.heads[first:last]))

    def _concat_heads(self, op: ops.ConcatHeads) -> None:
        parts, size = self._wanted.get(op.out.id), op.x_dim + op.y_dim
        if parts is None:
            self._ops.append(self._with_whole_inputs(op))
            return
        heads = tuple((first // size, last // size) for first, last in parts)

        def part(value: Value, dim: int) -> Value:
            is_shared = value.width == dim
            return self._whole(value) if is_shared else self._part(value, times(heads, dim))

        first, last = heads[self.rank]
        x, y = part(op.x, op.x_dim), part(op.y, op.y_dim)
        self._ops.append(
            replace(op, out=self._split(op.out, parts), x=x, y=y, num_heads=last - first)
        )

    def _norm(self, op: ops.Norm) -> None:
        parts = self._parts[op.x.id]
        whole = op.weight.cols == op.x.width and op.size < op.x.width

        def vector(weight: Weight | None) -> Weight | None:
            return share(weight, parts[self.rank]) if weight and whole else weight

        weight = vector(op.weight)
        assert weight
        self._ops.append(
            replace(
                op,
                out=self._split(op.out, parts),
                x=self._values[op.x.id],
                weight=weight,
                bias=vector(op.bias),
            )
        )

    def _add(self, op: ops.Add) -> None:
        """The columns of both that are here of one of them."""
        parts = self._parts.get(op.y.id) or self._parts[op.x.id]
        x, y = self._part(op.x, parts), self._part(op.y, parts)
        self._ops.append(ops.Add(self._split(op.out, parts), x, y))

    def _norm_rows(self, op: ops.Norm) -> None:
        """Whole rows, some on each rank."""
        parts = self._parts[op.x.id]
        rows, normed = self._new(op.x.width, op.x), self._new(op.x.width, op.x)
        self._ops.append(ColumnsToRows(rows, self._values[op.x.id], self.rank, parts))
        self._ops.append(
            NormShare(
                out=normed,
                x=rows,
                weight=op.weight,
                eps=op.eps,
                kind=op.kind,
                size=op.size,
                bias=op.bias,
                rank=self.rank,
                ranks=self.ranks,
            )
        )
        self._ops.append(GatherShares(op.out, normed, self.rank, self.ranks))

    def _follow(self, op: Op, x: Value) -> None:
        """An op that computes number by number: it does so with the columns that are here."""
        parts, out = self._parts.get(x.id), op.output()
        assert out
        if parts is None:
            self._ops.append(op)
            return
        here = {
            name: v
            for name, v in vars(op).items()
            if isinstance(v, Value) and v.id in self._parts and name != "out"
        }
        values = {name: self._values[v.id] for name, v in here.items()}
        self._ops.append(replace(op, **cast(Any, values | {"out": self._split(out, parts)})))

    def _with_whole_inputs(self, op: Op) -> Op:
        values = {
            name: self._whole(v)
            for name, v in vars(op).items()
            if isinstance(v, Value) and name != "out"
        }
        return replace(op, **cast(Any, values)) if values else op

    def _split(self, value: Value, parts: Parts) -> Value:
        """What an op writes here of a value."""
        first, last = parts[self.rank]
        if all(part == (0, value.width) for part in parts):
            return value
        self._parts[value.id] = parts
        self._values[value.id] = replace(value, width=last - first)
        return self._values[value.id]

    def _part(self, value: Value, parts: Parts) -> Value:
        """The wanted part of a value: what is here already, or taken out of the whole."""
        if self._parts.get(value.id) == parts:
            return self._values[value.id]
        whole, (first, last) = self._whole(value), parts[self.rank]
        if (first, last) == (0, value.width):
            return whole
        part = self._new(last - first, value)
        self._ops.append(TakeColumns(part, whole, first))
        return part

    def _whole(self, value: Value) -> Value:
        if value.id not in self._parts:
            return value
        if value.id not in self._gathered:
            whole = self._new(value.width, value)
            self._ops.append(
                AllGather(whole, self._values[value.id], self.rank, self._parts[value.id])
            )
            self._gathered[value.id] = whole
        return self._gathered[value.id]

    def _new(self, width: int, like: Value) -> Value:
        return Value(next(self._ids), width, like.rows)
