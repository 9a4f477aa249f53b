"""Tensor parallelism: matrices are split by output rows, and their inputs are gathered.

Megatron-LM (Shoeybi et al. 2019) adds partial sums, which round differently. Here any number of
ranks gives the same bits.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any, cast

import numpy as np

from headrace.errors import UnsupportedModelError
from headrace.parallel.partition import (
    TILE_ROWS,
    kv_head_parts,
    query_head_parts,
    scaled,
    split_evenly,
)
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


def slice_weight(weight: Weight, rows: Columns) -> Weight:
    """Return rows of a matrix, or numbers of a vector, as NAME[first:end]."""
    first, last = rows
    name, count = f"{weight.name}[{first}:{last}]", last - first
    if weight.rows == 1:
        return replace(weight, name=name, cols=count, nbytes=weight.nbytes // weight.cols * count)
    return replace(
        weight,
        name=name,
        rows=count,
        nbytes=weight.nbytes // weight.rows * count,
        whole_rows=weight.rows,
    )


def slice_tensor(tensors: Mapping[str, StoredTensor], weight: Weight) -> StoredTensor:
    """Return the stored tensor of a weight, sliced or not, as a view."""
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
    """Rewrites a program for one rank. Values keep their ids."""

    def __init__(
        self,
        program: Program,
        rank: int,
        ranks: int,
        shares_experts: bool = True,
        sequence: bool = False,
    ) -> None:
        """`shares_experts`: whether ranks divide the experts; `sequence`: whether the residual
        stream is split by columns and norms by rows.
        """
        self.rank, self.ranks = rank, ranks
        self._shares_experts, self._sequence = shares_experts, sequence
        self._program = program
        self._ids = count(1 + max(out.id for op in program.ops if (out := op.output())))
        self._decisions = {op.x.id for op in program.ops if isinstance(op, Route)}
        self._decisions |= {op.gate.id for op in program.ops if isinstance(op, GateRows)}
        self._writes: dict[int, list[ops.KvWrite]] = {}
        for op in program.ops:
            if isinstance(op, ops.KvWrite):
                self._writes.setdefault(op.layer, []).append(op)
        self._required_parts: dict[int, Parts] = {}
        self._parts: dict[int, Parts] = {}
        self._own_parts: dict[int, Value] = {}
        self._gathered: dict[int, Value] = {}
        self._ops: list[Op] = []

    def rewritten(self) -> Program:
        for op in reversed(self._program.ops):
            self._require_parts(op)
        for op in self._program.ops:
            self._rewrite(op)
        results = {value.id: self._whole(value) for value in self._program.results}
        program = self._program
        return replace(
            program,
            ops=tuple(self._ops),
            logits=program.logits and results[program.logits.id],
            hidden=program.hidden and results[program.hidden.id],
            pooled=program.pooled and results[program.pooled.id],
            taps=program.taps and results[program.taps.id],
            shared_kv_groups=tuple(self._own_heads(group) for group in program.kv_groups),
        )

    def _own_heads(self, group: KvGroup) -> KvGroup:
        first, last = kv_head_parts(group.layout.num_heads, self.ranks)[self.rank]
        return replace(group, layout=replace(group.layout, num_heads=last - first))

    def _require_parts(self, op: Op) -> None:
        if isinstance(op, ops.Attention):
            self._required_parts[op.q.id] = scaled(
                query_head_parts(op.num_heads, op.num_kv_heads, self.ranks), op.head_dim
            )
            heads = kv_head_parts(op.num_kv_heads, self.ranks)
            for write in self._writes.get(op.layer, []):
                for value in (write.k, write.v):
                    if value:
                        self._required_parts[value.id] = scaled(
                            heads, value.width // op.num_kv_heads
                        )
            return
        out = op.output()
        parts = self._required_parts.get(out.id) if out else None
        if not parts or not out:
            return
        if isinstance(op, ops.Rope | ops.Scale | ops.SoftCap | ops.Activate | ops.Threshold) or (
            isinstance(op, ops.Norm) and op.size < op.x.width
        ):
            self._required_parts[op.x.id] = parts
        elif isinstance(op, ops.ConcatHeads):
            size = op.x_dim + op.y_dim
            heads = tuple((first // size, last // size) for first, last in parts)
            for value, dim in ((op.x, op.x_dim), (op.y, op.y_dim)):
                if value.width == dim * op.num_heads and op.num_heads > 1:
                    self._required_parts[value.id] = scaled(heads, dim)
        elif isinstance(op, ops.HeadLinear) and op.x.width == op.heads[0].cols * len(op.heads):
            rows = op.heads[0].rows
            self._required_parts[op.x.id] = tuple(
                (first // rows * op.heads[0].cols, last // rows * op.heads[0].cols)
                for first, last in parts
            )

    def _rewrite(self, op: Op) -> None:
        match op:
            case ops.Embed():
                parts = self._row_parts(op.weight)
                first, last = parts[self.rank]
                part = self._new(op.out.width, op.out)
                self._ops.append(
                    EmbedPart(part, slice_weight(op.weight, (first, last)), first, op.weight.rows)
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
                        k=self._part(op.k, self._required_parts[op.k.id]),
                        v=op.v and self._part(op.v, self._required_parts[op.v.id]),
                    )
                )
            case ops.HeadLinear():
                self._head_linear(op)
            case ops.ConcatHeads():
                self._concat_heads(op)
            case ops.Glu() if self._parts.get(op.gate.id) == self._parts.get(op.up.id):
                self._elementwise(op, op.gate)
            case ops.Rope() if op.out.id not in self._required_parts:
                # Its input may be split within a head, which cannot be rotated.
                self._ops.append(self._with_whole_inputs(op))
            case ops.Rope() | ops.Scale() | ops.SoftCap() | ops.Activate() | ops.Threshold():
                self._elementwise(op, op.x)
            case ops.Norm() if op.size < op.x.width and op.x.id in self._parts:
                self._norm(op)
            case ops.Add() if self._sequence and (op.x.id in self._parts or op.y.id in self._parts):
                self._add(op)
            case ops.GatherRows() if self._sequence:
                self._elementwise(op, op.x)
            case ops.Norm() if self._sequence and op.x.id in self._parts and op.x.rows == "step":
                self._norm_rows(op)
            case _:
                self._ops.append(self._with_whole_inputs(op))

    def _row_parts(self, weight: Weight) -> Parts:
        unit = TILE_ROWS if weight.rows >= TILE_ROWS * self.ranks else 1
        return split_evenly(weight.rows, self.ranks, unit)

    def _linear(self, op: ops.Linear) -> None:
        parts = self._required_parts.get(op.out.id)
        if parts is None and (op.out.id in self._decisions or op.weight.rows < self.ranks):
            self._ops.append(self._with_whole_inputs(op))
            return
        parts = parts or self._row_parts(op.weight)
        rows = parts[self.rank]
        out = self._split(op.out, parts)
        self._ops.append(
            replace(
                op,
                out=out,
                x=self._whole(op.x),
                weight=slice_weight(op.weight, rows),
                bias=op.bias and slice_weight(op.bias, rows),
            )
        )

    def _experts(self, op: Experts) -> None:
        parts = split_evenly(len(op.gate), self.ranks)
        first, last = parts[self.rank]
        x, routing = self._whole(op.x), self._whole(op.routing)
        part = self._new(op.top_k * op.out.width, op.out)
        gathered = self._new(part.width, op.out)
        self._ops.append(
            ExpertPart(
                out=part,
                x=x,
                routing=routing,
                activation=op.activation,
                gate=op.gate[first:last],
                up=op.up[first:last],
                down=op.down[first:last],
                gate_bias=op.gate_bias[first:last],
                up_bias=op.up_bias[first:last],
                down_bias=op.down_bias[first:last],
                first=first,
                num_experts=len(op.gate),
            )
        )
        self._ops.append(
            OwnedExperts(out=gathered, x=part, routing=routing, rank=self.rank, parts=parts)
        )
        self._ops.append(Combine(op.out, gathered, routing))

    def _attention(self, op: ops.Attention) -> None:
        head_parts = query_head_parts(op.num_heads, op.num_kv_heads, self.ranks)
        first, last = head_parts[self.rank]
        first_kv, last_kv = kv_head_parts(op.num_kv_heads, self.ranks)[self.rank]
        share = op.num_heads // op.num_kv_heads
        if op.top_blocks and last - first != share * (last_kv - first_kv):
            raise UnsupportedModelError(
                f"{self.ranks} ranks divide the query heads of a KV head, which choose blocks of "
                f"KV together; use at most {op.num_kv_heads} ranks, or set attention_top_blocks "
                "and draft_top_blocks to 0"
            )
        q = self._part(op.q, self._required_parts[op.q.id])
        self._ops.append(
            replace(
                op,
                out=self._split(op.out, scaled(head_parts, op.value_dim)),
                q=q,
                num_heads=last - first,
                num_kv_heads=last_kv - first_kv,
                slopes=op.slopes[first:last],
                sinks=op.sinks and slice_weight(op.sinks, (first, last)),
                key_bias=op.key_bias
                and slice_weight(op.key_bias, (first_kv * op.head_dim, last_kv * op.head_dim)),
            )
        )

    def _head_linear(self, op: ops.HeadLinear) -> None:
        rows, cols = op.heads[0].rows, op.heads[0].cols
        has_shared_input = op.x.width == cols and len(op.heads) > 1
        parts = self._required_parts.get(op.out.id)
        if parts is None and not has_shared_input and op.x.id in self._parts:
            x_parts = self._parts[op.x.id]
            parts = tuple((first // cols * rows, last // cols * rows) for first, last in x_parts)
        if parts is None:
            self._ops.append(self._with_whole_inputs(op))
            return

        if has_shared_input:
            x = self._whole(op.x)
        else:
            x_parts = tuple((first // rows * cols, last // rows * cols) for first, last in parts)
            x = self._part(op.x, x_parts)
        first, last = (column // rows for column in parts[self.rank])
        self._ops.append(ops.HeadLinear(self._split(op.out, parts), x, op.heads[first:last]))

    def _concat_heads(self, op: ops.ConcatHeads) -> None:
        parts, size = self._required_parts.get(op.out.id), op.x_dim + op.y_dim
        if parts is None:
            self._ops.append(self._with_whole_inputs(op))
            return
        head_parts = tuple((first // size, last // size) for first, last in parts)

        def part(value: Value, dim: int) -> Value:
            is_shared = value.width == dim
            return self._whole(value) if is_shared else self._part(value, scaled(head_parts, dim))

        first, last = head_parts[self.rank]
        x, y = part(op.x, op.x_dim), part(op.y, op.y_dim)
        self._ops.append(
            replace(op, out=self._split(op.out, parts), x=x, y=y, num_heads=last - first)
        )

    def _norm(self, op: ops.Norm) -> None:
        parts = self._parts[op.x.id]
        has_weight_per_column = op.weight.cols == op.x.width and op.size < op.x.width

        def own_columns(weight: Weight) -> Weight:
            return slice_weight(weight, parts[self.rank]) if has_weight_per_column else weight

        self._ops.append(
            replace(
                op,
                out=self._split(op.out, parts),
                x=self._own_parts[op.x.id],
                weight=own_columns(op.weight),
                bias=op.bias and own_columns(op.bias),
            )
        )

    def _add(self, op: ops.Add) -> None:
        parts = self._parts.get(op.y.id) or self._parts[op.x.id]
        x, y = self._part(op.x, parts), self._part(op.y, parts)
        self._ops.append(ops.Add(self._split(op.out, parts), x, y))

    def _norm_rows(self, op: ops.Norm) -> None:
        parts = self._parts[op.x.id]
        rows, normed = self._new(op.x.width, op.x), self._new(op.x.width, op.x)
        self._ops.append(ColumnsToRows(rows, self._own_parts[op.x.id], self.rank, parts))
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

    def _elementwise(self, op: Op, x: Value) -> None:
        parts, out = self._parts.get(x.id), op.output()
        assert out
        if parts is None:
            self._ops.append(op)
            return
        changes = {
            name: self._own_parts[value.id]
            for name, value in _input_fields(op)
            if value.id in self._parts
        }
        changes["out"] = self._split(out, parts)
        self._ops.append(replace(op, **cast(Any, changes)))

    def _with_whole_inputs(self, op: Op) -> Op:
        changes = {name: self._whole(value) for name, value in _input_fields(op)}
        return replace(op, **cast(Any, changes)) if changes else op

    def _split(self, value: Value, parts: Parts) -> Value:
        first, last = parts[self.rank]
        if all(part == (0, value.width) for part in parts):
            return value
        self._parts[value.id] = parts
        self._own_parts[value.id] = replace(value, width=last - first)
        return self._own_parts[value.id]

    def _part(self, value: Value, parts: Parts) -> Value:
        if self._parts.get(value.id) == parts:
            return self._own_parts[value.id]
        whole = self._whole(value)
        first, last = parts[self.rank]
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
                AllGather(whole, self._own_parts[value.id], self.rank, self._parts[value.id])
            )
            self._gathered[value.id] = whole
        return self._gathered[value.id]

    def _new(self, width: int, like: Value) -> Value:
        return Value(next(self._ids), width, like.rows)


def _input_fields(op: Op) -> list[tuple[str, Value]]:
    return [
        (name, value)
        for name, value in vars(op).items()
        if isinstance(value, Value) and name != "out"
    ]
