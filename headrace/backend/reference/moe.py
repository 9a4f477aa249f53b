"""What the reference backend makes of mixtures of experts."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.backend.reference.activations import gated
from headrace.program import moe as mixture

if TYPE_CHECKING:
    from headrace.backend.reference.executable import _Step

Floats = NDArray[np.float64]


def route(s: "_Step", op: mixture.Route) -> Floats:
    """`mixture.Route`."""
    logits = s.x(op.x)
    if op.scoring == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = scores / scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    wanted = scores if op.bias is None else scores + s.w(op.bias)
    if op.groups > 1:
        ascending = np.sort(wanted.reshape(-1, op.groups, op.x.width // op.groups), axis=2)
        best = ascending[:, :, -1 if op.scoring == "softmax" else -2 :].sum(axis=2)
        chosen = np.argsort(-best, axis=1, kind="stable")[:, : op.top_groups]
        within = np.zeros(best.shape, bool)
        np.put_along_axis(within, chosen, True, axis=1)
        wanted = np.where(np.repeat(within, wanted.shape[1] // op.groups, axis=1), wanted, -np.inf)
    experts = np.argsort(-wanted, axis=1, kind="stable")[:, : op.top_k]
    weights = np.take_along_axis(scores, experts, axis=1)
    spoilt = ~np.isfinite(logits).all(axis=1)
    experts[spoilt], weights[spoilt] = np.arange(op.top_k), np.nan
    if op.normalised:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return np.concatenate([experts, weights * op.factor], axis=1)


def experts(s: "_Step", op: mixture.Experts) -> Floats:
    """`mixture.Experts`, which also counts the rows of each."""
    x, routing = s.x(op.x), s.x(op.routing)
    experts, weights = routing[:, : op.top_k].astype(np.int64), routing[:, op.top_k :]
    each = np.empty((len(x), op.top_k, op.out.width))
    for e in np.unique(experts):
        rows, places = np.nonzero(experts == e)
        s.executable.loads[op.out.id][e] += len(rows)
        gate, up, down = (
            (w[e], b[e] if b else None)
            for w, b in ((op.gate, op.gate_bias), (op.up, op.up_bias), (op.down, op.down_bias))
        )
        hidden = gated(s.product(x[rows], *gate), s.product(x[rows], *up), op.activation)
        each[rows, places] = s.product(hidden, *down)
    mixed: Floats = (each * weights[:, :, None]).sum(axis=1)
    return mixed


def gate_rows(s: "_Step", op: mixture.GateRows) -> Floats:
    """`mixture.GateRows`."""
    y: Floats = s.x(op.x) / (1 + np.exp(-s.x(op.gate)))
    return y
