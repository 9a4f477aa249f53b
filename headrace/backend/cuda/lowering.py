"""Kernel launches of a program's ops, for steps of one shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.backend.cuda import lowering_ranks
from headrace.backend.cuda.adapters import Adapters
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.exchange import Transport
from headrace.backend.cuda.kernels import elementwise, gather
from headrace.backend.cuda.kernels.align_experts import (
    Aligned,
    align_experts,
    combine,
    empty_aligned,
)
from headrace.backend.cuda.kernels.embed import embed, embed_position
from headrace.backend.cuda.kernels.exit_choice import exit_choice
from headrace.backend.cuda.kernels.experts import expert_linear, tile_rows
from headrace.backend.cuda.kernels.head_linear import head_linear
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.norm import norm
from headrace.backend.cuda.kernels.quantise_rows import quantise_rows
from headrace.backend.cuda.kernels.rope import rope
from headrace.backend.cuda.kernels.rope_angles import rope_angles
from headrace.backend.cuda.kernels.route import route
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.packing import PackedWeight
from headrace.backend.cuda.step_input import StepInput
from headrace.backend.cuda.weights import Weights
from headrace.backend.cuda.workspace import Workspace
from headrace.program import moe, ops
from headrace.program.op import Op, Value, Weight


@dataclass
class Lowering:
    """Collects the launches of ops."""

    value: Callable[[Value], torch.Tensor]  # The tensor of a value, [rows, width]
    weights: Weights
    workspace: Workspace
    step: StepInput
    adapters: Adapters | None  # None if no row of the step has an adapter
    # rows routed to each expert, by the value id of the experts' output
    loads: dict[int, torch.Tensor]
    packed: torch.dtype  # Type that activations are multiplied in
    transport: Transport | None = None  # Of one of several ranks
    launches: list[Launch] = field(default_factory=list)
    # Rows grouped by adapter, for each kind of rows
    _tiles: dict[str, Aligned] = field(default_factory=dict)
    # int8 codes and scales, by (value id, whether outliers stay floats)
    _codes: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def lower(self, op: Op) -> None:
        out = op.output()
        if out is not None:
            if not len(self.value(out)):
                return  # a prompt chunk has no rows with logits
            # The tensor of `out` held another value before: its codes are out of date.
            self._codes = {key: codes for key, codes in self._codes.items() if key[0] != out.id}
        for launch in LOWER[type(op)](self, op):
            self.launches.append(launch)

    def rows_of(self, value: Value, out: Value) -> torch.Tensor:
        """The rows of `value` that `out` has."""
        x, num_logit_rows = self.value(value), self.step.shape.logit_rows
        if value.rows == out.rows:
            return x
        return x[:num_logit_rows] if out.rows == "logit" else x[num_logit_rows:]

    def linear(
        self,
        out: torch.Tensor,
        x: Value,
        weights: Sequence[Weight],
        biases: Sequence[Weight | None],
        *,
        activation: str = "",
        residual: torch.Tensor | None = None,
        gate: bool = False,
    ) -> list[Launch]:
        """A product with matrices stacked by rows, fused with the ops after it.

        Matrices of different layouts are multiplied one by one; then no other op is fused.
        """
        launches: list[Launch] = []
        rows = self.value(x)
        delta = self._delta(launches, x, weights)
        bias: torch.Tensor | None = None
        if any(biases):
            bias = self.weights.vectors(biases, [weight.rows for weight in weights])

        stack = self.weights.try_stack(weights)
        if stack:
            product = linear(
                out,
                rows,
                stack,
                bias=bias,
                activation=activation,
                residual=residual,
                delta=delta,
                gate=gate,
                quantised=self._in_int8(launches, x, stack),
                activations=self.packed,
                workspace=self.workspace,
            )
            return [*launches, product]

        is_fused = gate or residual is not None or activation
        assert not is_fused, "fused ops need matrices of one layout"
        first = 0
        for weight in weights:
            part = slice(first, first + weight.rows)
            matrix = self.weights.matrix(weight)
            quantised = self._in_int8(launches, x, matrix)
            product = linear(
                out[:, part],
                rows,
                matrix,
                bias=None if bias is None else bias[part],
                delta=None if delta is None else delta[:, part],
                quantised=quantised,
                activations=self.packed,
                workspace=self.workspace,
            )
            launches.append(product)
            first += weight.rows
        return launches

    def experts(
        self, op: moe.Experts, out: torch.Tensor, first: int, num_experts: int
    ) -> list[Launch]:
        """Products of each row with its experts: out[row * top_k + choice].

        The op has experts from `first` on, of `num_experts`; no product of others is written.
        """
        x, routing, own_experts = self.value(op.x), self.value(op.routing), len(op.gate)
        pairs, width = len(x) * op.top_k, op.down[0].cols
        block_m = tile_rows(pairs, num_experts)
        aligned = self.workspace.once(
            f"aligned experts {len(x)} {op.top_k} {own_experts} {block_m}",
            lambda: empty_aligned(len(x), op.top_k, own_experts, block_m, DEVICE),
        )

        gate_up, down = self.weights.stack([*op.gate, *op.up]), self.weights.stack(op.down)
        hidden_type = torch.float32 if down.layout.is_wide else self.packed
        hidden = self.workspace.take("expert hidden", pairs, width, hidden_type)
        gate_up_bias, down_bias = (
            self.weights.vectors(biases, [weight.cols for weight in biases]) if biases else None
            for biases in ((*op.gate_bias, *op.up_bias), op.down_bias)
        )
        # Pooled rows follow the padding of logit rows, so no count tells rows from padding: all
        # are routed, and expert loads of such steps count padding, too.
        has_pooled = op.x.rows != "step" and self.step.shape.pooled_rows > 0
        num_rows = self.step.all_rows if has_pooled else self.step.num_rows
        return [
            *align_experts(aligned, routing, num_rows, self.loads[op.out.id], first),
            expert_linear(
                hidden,
                x,
                aligned,
                gate_up,
                own_experts,
                op.top_k,
                bias=gate_up_bias,
                activation=op.activation,
                activations=self.packed,
            ),
            expert_linear(
                out,
                hidden,
                aligned,
                down,
                own_experts,
                1,
                bias=down_bias,
                activations=self.packed,
            ),
        ]

    def _in_int8(
        self, launches: list[Launch], x: Value, weight: PackedWeight
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        layout = weight.layout
        if not layout.rows_in_int8:
            return None
        key = x.id, layout.outliers
        if key not in self._codes:
            rows, name = self.value(x), f"codes {len(self._codes)}"
            codes = self.workspace.take(name, len(rows), layout.padded_cols(x.width), torch.int8)
            scales = self.workspace.take(f"{name} scales", len(rows), 1)[:, 0]
            launches.append(quantise_rows(codes, scales, rows, layout.outliers))
            self._codes[key] = codes, scales
        return self._codes[key]

    def _delta(
        self, launches: list[Launch], x: Value, weights: Sequence[Weight]
    ) -> torch.Tensor | None:
        # [rows, rows of all weights]
        if not self.adapters or not any(weight.name in self.adapters.tables for weight in weights):
            return None

        # Rows are grouped by adapter once per step, for each kind of rows.
        if x.rows not in self._tiles:
            self._tiles[x.rows], align_launches = self.adapters.aligned(
                self.step.adapters_of(x.rows), self.step.all_rows, self.workspace
            )
            launches += align_launches

        rows = self.value(x)
        width = sum(weight.rows for weight in weights)
        delta = self.workspace.take("delta", len(rows), width)
        first = 0
        for weight in weights:
            part = delta[:, first : first + weight.rows]
            launches += self.adapters.launches(
                part, rows, weight.name, self._tiles[x.rows], self.workspace
            )
            first += weight.rows
        return delta


def _embed(s: Lowering, op: ops.Embed) -> list[Launch]:
    return [
        embed(
            s.value(op.out),
            s.weights.matrix(op.weight),
            s.step.tokens,
            s.step.source,
            s.step.last_tokens,
        )
    ]


def _embed_position(s: Lowering, op: ops.EmbedPosition) -> list[Launch]:
    return [embed_position(s.value(op.out), s.weights.matrix(op.weight), s.step.positions)]


def _input(s: Lowering, op: ops.Input) -> list[Launch]:
    return []  # the executable copies the rows there


def _rope_angles(s: Lowering, op: ops.RopeAngles) -> list[Launch]:
    frequencies = torch.tensor(op.inverse_frequencies, dtype=torch.float64, device=DEVICE)
    return [rope_angles(s.value(op.out), s.step.positions, frequencies, op.scale)]


def _norm(s: Lowering, op: ops.Norm) -> list[Launch]:
    weight, bias = s.weights.vector(op.weight), s.weights.vector(op.bias) if op.bias else None
    return [norm(s.value(op.out), s.rows_of(op.x, op.out), weight, bias, op.eps, op.kind, op.size)]


def _linear(s: Lowering, op: ops.Linear) -> list[Launch]:
    return s.linear(s.value(op.out), op.x, [op.weight], [op.bias])


def _linear_add(s: Lowering, op: ops.LinearAdd) -> list[Launch]:
    return s.linear(s.value(op.out), op.x, [op.weight], [op.bias], residual=s.value(op.residual))


def _linear_activate(s: Lowering, op: ops.LinearActivate) -> list[Launch]:
    return s.linear(s.value(op.out), op.x, [op.weight], [op.bias], activation=op.activation)


def _head_linear(s: Lowering, op: ops.HeadLinear) -> list[Launch]:
    return [
        head_linear(
            s.value(op.out), s.value(op.x), s.weights.stack(op.heads), len(op.heads), s.packed
        )
    ]


def _concat_heads(s: Lowering, op: ops.ConcatHeads) -> list[Launch]:
    return [
        gather.concat_heads(
            s.value(op.out), s.value(op.x), s.value(op.y), op.num_heads, op.x_dim, op.y_dim
        )
    ]


def _rope(s: Lowering, op: ops.Rope) -> list[Launch]:
    return [rope(s.value(op.out), s.value(op.x), s.value(op.angles), op.head_dim)]


def _kv_write(s: Lowering, op: ops.KvWrite) -> list[Launch]:
    return s.step.attention.write(op.layer, s.value(op.k), s.value(op.v) if op.v else None)


def _qkv_rope_write(s: Lowering, op: ops.QkvRopeWrite) -> list[Launch]:
    weights, biases = (op.q, op.k, op.v), (op.q_bias, op.k_bias, op.v_bias)
    qkv = s.workspace.take("qkv", s.step.shape.rows, sum(weight.rows for weight in weights))
    product = s.linear(qkv, op.x, weights, biases)
    return [
        *product,
        *s.step.attention.rope_write(op.layer, s.value(op.out), qkv, s.value(op.angles)),
    ]


def _attention(s: Lowering, op: ops.Attention) -> list[Launch]:
    sinks = s.weights.vector(op.sinks) if op.sinks else None
    key_bias = s.weights.tensors[op.key_bias.name] if op.key_bias else None
    return s.step.attention.attend(op, s.value(op.out), s.value(op.q), sinks, key_bias, s.workspace)


def _glu(s: Lowering, op: ops.Glu) -> list[Launch]:
    return [elementwise.glu(s.value(op.out), s.value(op.gate), s.value(op.up), op.activation)]


def _glu_linear(s: Lowering, op: ops.GluLinear) -> list[Launch]:
    weights, biases, out = (op.gate, op.up), (op.gate_bias, op.up_bias), s.value(op.out)
    if s.weights.try_stack(weights):
        return s.linear(out, op.x, weights, biases, gate=True, activation=op.activation)

    width = out.shape[1]
    gate_up = s.workspace.take("gate and up", len(out), 2 * width)
    product = s.linear(gate_up, op.x, weights, biases)
    return [*product, elementwise.glu(out, gate_up[:, :width], gate_up[:, width:], op.activation)]


def _activate(s: Lowering, op: ops.Activate) -> list[Launch]:
    return [elementwise.activate(s.value(op.out), s.value(op.x), op.activation)]


def _scale(s: Lowering, op: ops.Scale) -> list[Launch]:
    return [elementwise.scale(s.value(op.out), s.value(op.x), op.factor)]


def _threshold(s: Lowering, op: ops.Threshold) -> list[Launch]:
    return [elementwise.threshold(s.value(op.out), s.value(op.x), op.least)]


def _soft_cap(s: Lowering, op: ops.SoftCap) -> list[Launch]:
    return [elementwise.soft_cap(s.value(op.out), s.value(op.x), op.cap)]


def _add(s: Lowering, op: ops.Add) -> list[Launch]:
    return [elementwise.add(s.value(op.out), s.value(op.x), s.value(op.y))]


def _exit_choice(s: Lowering, op: ops.ExitChoice) -> list[Launch]:
    late = s.value(op.late) if op.late else None
    return [exit_choice(s.value(op.out), s.value(op.early), late, op.min_margin)]


def _gather_rows(s: Lowering, op: ops.GatherRows) -> list[Launch]:
    return [gather.gather_rows(s.value(op.out), s.value(op.x), s.step.gathered)]


def _gate_rows(s: Lowering, op: moe.GateRows) -> list[Launch]:
    return [elementwise.gate_rows(s.value(op.out), s.value(op.x), s.value(op.gate))]


def _route(s: Lowering, op: moe.Route) -> list[Launch]:
    bias = s.weights.vector(op.bias) if op.bias else None
    return [
        route(
            s.value(op.out),
            s.value(op.x),
            bias,
            op.top_k,
            op.scoring,
            op.normalised,
            op.factor,
            op.groups,
            op.top_groups,
        )
    ]


def _experts(s: Lowering, op: moe.Experts) -> list[Launch]:
    pairs = s.workspace.take("expert outputs", len(s.value(op.x)) * op.top_k, op.out.width)
    launches = s.experts(op, pairs, 0, len(op.gate))
    return [*launches, combine(s.value(op.out), pairs, s.value(op.routing))]


LOWER: dict[type[Op], Callable[[Lowering, Any], list[Launch]]] = {
    ops.Embed: _embed,
    ops.EmbedPosition: _embed_position,
    ops.Input: _input,
    ops.RopeAngles: _rope_angles,
    ops.Norm: _norm,
    ops.Linear: _linear,
    ops.LinearAdd: _linear_add,
    ops.LinearActivate: _linear_activate,
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
    **lowering_ranks.LOWER,
}
