"""All ranks in one process, in float64 over NumPy: the reference for tests of rewritten programs.

The ranks of a stage run one op at a time; a collective op runs when all ranks have reached it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend.reference.activations import gated
from headrace.backend.reference.executable import ReferenceExecutable
from headrace.backend.reference.ops import Step, norm
from headrace.backend.reference.top_blocks import hidden_positions
from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from headrace.parallel.collectives import owners
from headrace.parallel.tensor import slice_tensor
from headrace.program import collective, ops
from headrace.program.op import Op, Weight
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.stats import StageStep

Floats = NDArray[np.float64]


class _ExactStep(Step):
    """Products that do not depend on the number of rows of a matrix, as a BLAS product may."""

    def product(self, x: Floats, weight: Weight, bias: Weight | None) -> Floats:
        y: Floats = (x[:, None, :] * self.w(weight)).sum(axis=2)
        return y if bias is None else y + self.w(bias)


class LockStep:
    """Runs the programs of ranks: op by op in a stage, and stage after stage."""

    def __init__(
        self, stages: Sequence[Sequence[Program]], tensors: Mapping[str, StoredTensor], kv: KvConfig
    ) -> None:
        def executable(program: Program) -> ReferenceExecutable:
            return ReferenceExecutable(
                program,
                {name: slice_tensor(tensors, weight) for name, weight in program.weights.items()},
                kv,
            )

        self.stages = [[executable(program) for program in programs] for programs in stages]

    def stage_steps(
        self, batches: Sequence[RaggedBatch], seconds: Callable[[Program, RaggedBatch], float]
    ) -> list[StageStep]:
        """Run batches, and simulate their times: `seconds` of each program and batch.

        A stage begins a step after its previous step, and after the previous stage has sent its
        rows.
        """
        free = [0.0] * len(self.stages)
        stage_steps: list[StageStep] = []
        for number, batch in enumerate(batches):
            self.logits(batch)
            sent = 0.0
            for stage, ranks in enumerate(self.stages):
                begin = max(free[stage], sent)
                sent = free[stage] = begin + max(seconds(rank.program, batch) for rank in ranks)
                stage_steps += [
                    StageStep(stage * len(ranks) + share, number, begin, sent)
                    for share in range(len(ranks))
                ]
        return stage_steps

    def logits(self, batch: RaggedBatch) -> list[Floats]:
        """Run a batch; return the logits of each rank of the last stage."""
        sent: list[list[Floats]] = []
        for stage in self.stages:
            steps, received = [_ExactStep(rank, batch) for rank in stage], iter(sent)
            sent = []
            for rank_ops in zip(*(rank.program.ops for rank in stage), strict=True):
                if isinstance(rank_ops[0], collective.Send):
                    sent.append([step.x(op.x) for step, op in zip(steps, rank_ops, strict=True)])
                elif isinstance(rank_ops[0], collective.Receive):
                    for step, op, rows in zip(steps, rank_ops, next(received), strict=True):
                        step.rows[op.out.id] = rows
                else:
                    _run_ops(steps, rank_ops)
        return [
            step.rows[logits.id]
            for step, rank in zip(steps, self.stages[-1], strict=True)
            if (logits := rank.program.logits)
        ]


def _run_ops(steps: Sequence[Step], rank_ops: Sequence[Op]) -> None:
    """Run the same op on each rank of a stage."""
    (kind,) = {type(op) for op in rank_ops}
    if kind in COLLECTIVE_OPS:
        for step, op, rows in zip(
            steps, rank_ops, COLLECTIVE_OPS[kind](steps, rank_ops), strict=True
        ):
            out = op.output()
            assert out
            step.rows[out.id] = rows
    else:
        for step, op in zip(steps, rank_ops, strict=True):
            _run_op(step, op)


def _run_op(step: Step, op: Op) -> None:
    if type(op) in LOCAL_OPS:
        out = op.output()
        assert out
        step.rows[out.id] = LOCAL_OPS[type(op)](step, op)
    else:
        step.run(op)


def _embed_part(s: Step, op: collective.EmbedPart) -> Floats:
    here = (s.batch.tokens >= op.first) & (s.batch.tokens < op.first + op.weight.rows)
    return np.where(
        here[:, None], s.w(op.weight)[np.where(here, s.batch.tokens - op.first, 0)], 0.0
    )


def _norm_share(s: Step, op: collective.NormShare) -> Floats:
    x = s.x(op.x)
    first, last = collective.row_share(len(x), op.rank, op.ranks)
    whole = np.full(x.shape, np.nan)
    s.rows[op.x.id] = x[first:last]
    whole[first:last] = norm(s, op)
    s.rows[op.x.id] = x
    return whole


def _take_columns(s: Step, op: collective.TakeColumns) -> Floats:
    return s.x(op.x)[:, op.first : op.first + op.out.width]


def _expert_part(s: Step, op: collective.ExpertPart) -> Floats:
    x, chosen = s.x(op.x), s.x(op.routing)[:, : op.top_k].astype(np.int64) - op.first
    out = np.zeros((len(x), op.top_k, op.x.width))
    for e in range(len(op.gate)):
        rows, places = np.nonzero(chosen == e)
        gate, up, down = (
            (w[e], b[e] if b else None)
            for w, b in ((op.gate, op.gate_bias), (op.up, op.up_bias), (op.down, op.down_bias))
        )
        hidden = gated(s.product(x[rows], *gate), s.product(x[rows], *up), op.activation)
        out[rows, places] = s.product(hidden, *down)
    return out.reshape(len(x), op.out.width)


def _combine(s: Step, op: collective.Combine) -> Floats:
    routing = s.x(op.routing)
    top_k = routing.shape[1] // 2
    by_choice = s.x(op.x).reshape(len(routing), top_k, op.out.width)
    combined: Floats = (by_choice * routing[:, top_k:, None]).sum(axis=1)
    return combined


def _attention(s: Step, op: ops.Attention) -> Floats:
    """Compute head by head, so a head does not depend on the number of heads on a rank."""
    out = np.empty((len(s.batch.tokens), op.num_heads, op.value_dim))
    group, place = s.memory.places[op.layer]
    store, sharers = s.memory.stores[group], op.num_heads // op.num_kv_heads
    sinks = s.w(op.sinks).reshape(-1) if op.sinks else None
    queries = s.x(op.q).reshape(len(out), op.num_kv_heads, sharers, op.head_dim)
    for row, slots in enumerate(s.visible(group)):
        before = max(0, len(slots) - op.window) if op.window else 0
        seen = np.array([*range(min(before, op.num_sink_tokens)), *range(before, len(slots))])
        hidden = None
        if op.top_blocks:
            keys = store.keys[place, slots]
            hidden = hidden_positions(op, s.memory.kv.dtype, queries[row], keys, None, before)
        for head in range(op.num_heads):
            at = seen if hidden is None else seen[~hidden[head // sharers, seen]]
            k = np.ascontiguousarray(
                store.keys[place, slots[at], head // sharers]
            )  # [seen, head_dim]
            v = (
                k[:, : op.value_dim]
                if op.is_latent
                else np.ascontiguousarray(store.values[place, slots[at], head // sharers])
            )
            scores = (k * s.x(op.q)[row, head * op.head_dim :][: op.head_dim]).sum(
                axis=1
            ) * op.scale
            if op.softcap:
                scores = op.softcap * np.tanh(scores / op.softcap)
            if op.slopes:
                scores = scores - op.slopes[head] * (len(slots) - 1 - at)
            max_score = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - max_score)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - max_score))
            out[row, head] = (v * (weights / total)[:, None]).sum(axis=0)
    return out.reshape(len(out), -1)


def _all_gather(steps: Sequence[Step], rank_ops: Sequence[collective.AllGather]) -> list[Floats]:
    whole = np.full((len(steps[0].x(rank_ops[0].x)), rank_ops[0].out.width), np.nan)
    for step, op, (first, last) in zip(steps, rank_ops, rank_ops[0].parts, strict=True):
        whole[:, first:last] = step.x(op.x)
    return [whole] * len(steps)


def _columns_to_rows(
    steps: Sequence[Step], rank_ops: Sequence[collective.ColumnsToRows]
) -> list[Floats]:
    whole = np.concatenate([step.x(op.x) for step, op in zip(steps, rank_ops, strict=True)], axis=1)
    shares = []
    for op in rank_ops:
        first, last = collective.row_share(len(whole), op.rank, len(op.parts))
        share = np.full_like(whole, np.nan)
        share[first:last] = whole[first:last]
        shares.append(share)
    return shares


def _gather_shares(
    steps: Sequence[Step], rank_ops: Sequence[collective.GatherShares]
) -> list[Floats]:
    shares = [
        collective.row_share(len(step.x(op.x)), op.rank, op.ranks)
        for step, op in zip(steps, rank_ops, strict=True)
    ]
    return [
        np.concatenate(
            [
                step.x(op.x)[slice(*share)]
                for step, op, share in zip(steps, rank_ops, shares, strict=True)
            ]
        )
    ] * len(steps)


def _owned_rows(steps: Sequence[Step], rank_ops: Sequence[collective.OwnedRows]) -> list[Floats]:
    owner = owners(rank_ops[0].parts, steps[0].batch.tokens)
    gathered = np.stack([step.x(op.x) for step, op in zip(steps, rank_ops, strict=True)])
    return [gathered[owner, np.arange(len(owner))]] * len(steps)


def _owned_experts(
    steps: Sequence[Step], rank_ops: Sequence[collective.OwnedExperts]
) -> list[Floats]:
    op, routing = rank_ops[0], steps[0].x(rank_ops[0].routing)
    top_k = routing.shape[1] // 2
    owner = owners(op.parts, routing[:, :top_k].astype(np.int64))
    gathered = np.stack(
        [
            step.x(op.x).reshape(len(routing), top_k, op.x.width // top_k)
            for step, op in zip(steps, rank_ops, strict=True)
        ]
    )
    owned = gathered[owner, np.arange(len(routing))[:, None], np.arange(top_k)]
    return [owned.reshape(len(routing), op.x.width)] * len(steps)


LOCAL_OPS: dict[type[Op], Callable[[Step, Any], Floats]] = {
    ops.Attention: _attention,
    collective.EmbedPart: _embed_part,
    collective.TakeColumns: _take_columns,
    collective.NormShare: _norm_share,
    collective.ExpertPart: _expert_part,
    collective.Combine: _combine,
}
COLLECTIVE_OPS: dict[type[Op], Callable[[Sequence[Step], Any], list[Floats]]] = {
    collective.AllGather: _all_gather,
    collective.ColumnsToRows: _columns_to_rows,
    collective.GatherShares: _gather_shares,
    collective.OwnedRows: _owned_rows,
    collective.OwnedExperts: _owned_experts,
}
