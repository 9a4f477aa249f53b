"""Logit ops on the host."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.batch import Ints, RaggedBatch, TokenLogprobs, ints
from headrace.config import AcceptanceMethod
from headrace.errors import NonFiniteLogitsError
from headrace.logit_ops import (
    Expand,
    Expanded,
    LogitOp,
    LogitOpResult,
    Pool,
    Pooled,
    RankBeams,
    RankedBeams,
    SampleOp,
    SampleResult,
    Score,
)
from headrace.sampling.exact import verify_exact
from headrace.sampling.rejection import verify_rejection
from headrace.sampling.sampler import Sampler, token_logprobs
from headrace.sampling.typical import verify_typical
from headrace.sampling.verification import Logits, Verifier

VERIFIERS: dict[AcceptanceMethod, Verifier] = {
    "exact": verify_exact,
    "rejection": verify_rejection,
    "typical": verify_typical,
}

_NEVER = np.float32(-1e9)
"""Logit of tokens without one; finite, because samplers check logits."""


def run_logit_ops(
    ops: Sequence[LogitOp],
    logits: Logits,
    pooled: NDArray[np.float32] | None = None,
    pool: _native.Pool | None = None,
) -> list[LogitOpResult]:
    """Run ops with the threads of the pool; returns their results in order.

    An `Expand` overwrites its row of logits, so no other op may read it. `Pool` ops read `pooled`
    [rows, dim].
    """
    # No module holds a pool: the interpreter would count it as a leak at its end.
    pool = pool or _native.Pool(1)
    methods: list[Callable[..., Sequence[LogitOpResult]]] = [
        VERIFIERS[op.method] if isinstance(op, SampleOp) else _METHODS[type(op)] for op in ops
    ]
    if len(set(methods)) == 1:
        return list(methods[0](ops, pooled if methods[0] is _pool else logits, pool))

    indices_by_method: dict[Callable[..., Sequence[LogitOpResult]], list[int]] = {}
    for i, method in enumerate(methods):
        indices_by_method.setdefault(method, []).append(i)
    results: list[LogitOpResult] = [None] * len(ops)
    for method, indices in indices_by_method.items():
        rows = pooled if method is _pool else logits
        values = method([ops[i] for i in indices], rows, pool)
        for i, value in zip(indices, values, strict=True):
            results[i] = value
    return results


def tokens_of(batch: RaggedBatch, values: Sequence[LogitOpResult]) -> Ints:
    """The tokens of a batch [T], with pending tokens from the last launch's results `values`.

    An op whose logits were not finite gives token 0.
    """
    if batch.token_source is None:
        return batch.tokens
    pairs = zip(batch.tokens.tolist(), batch.token_source.tolist(), strict=True)
    return ints([token if source < 0 else _last_token(values[source]) for token, source in pairs])


def _last_token(value: LogitOpResult) -> int:
    return value.tokens[-1] if isinstance(value, SampleResult) else 0


def _score(ops: Sequence[Score], logits: Logits, pool: _native.Pool) -> list[TokenLogprobs | None]:
    return [_score_one(op, logits[op.row]) for op in ops]


def _score_one(op: Score, row: NDArray[np.float32]) -> TokenLogprobs | None:
    try:
        return token_logprobs(row, op.token, op.num_logprobs)
    except NonFiniteLogitsError:
        return None


def _rank(ops: Sequence[RankBeams], logits: Logits, pool: _native.Pool) -> list[RankedBeams | None]:
    return [
        None if ranked is None else RankedBeams(*ranked)
        for ranked in _native.rank_beams(pool, logits, cast(Any, ops))
    ]


def _expand(ops: Sequence[Expand], logits: Logits, pool: _native.Pool) -> list[Expanded | None]:
    probabilities = [_probabilities(op, logits) for op in ops]
    results = _native.expand(pool, logits, cast(Any, ops))
    return [
        None if expanded is None else Expanded(expanded[0], p, expanded[1])
        for expanded, p in zip(results, probabilities, strict=True)
    ]


def _probabilities(op: Expand, logits: Logits) -> NDArray[np.float64] | None:
    if not op.probabilities:
        return None
    sampler, row = cast(Sampler, op.sampler), logits[op.row]
    if op.tokens is not None:
        row = np.full(sampler.options["vocab"], _NEVER)
        row[op.tokens.tokens] = logits[op.row]
    try:
        return sampler.probabilities(row, op.position, op.masks)
    except NonFiniteLogitsError:
        return None  # the sampler meets the same logits, so the op has no result


def _pool(
    ops: Sequence[Pool], rows: NDArray[np.float32], pool: _native.Pool
) -> list[Pooled | None]:
    totals = [op.state.add(rows[op.row : op.row + op.num_rows]) for op in ops]
    return [Pooled(total) if np.isfinite(total).all() else None for total in totals]


_METHODS: dict[type[LogitOp], Callable[..., Sequence[LogitOpResult]]] = {
    Score: _score,
    RankBeams: _rank,
    Expand: _expand,
    Pool: _pool,
}
