"""Logit ops on the host, for executables whose logits are in its memory."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.batch import RaggedBatch, TokenLogprobs
from headrace.config import AcceptanceMethod
from headrace.errors import NonFiniteLogitsError
from headrace.logit_ops import Draw, Drawn, Expand, Expanded, LogitOp, LogitOpResult, Ranked, Score, TopTokens
from headrace.sampling.exact import Verification, Verifier, verify_exact
from headrace.sampling.rejection import verify_rejection
from headrace.sampling.sampler import Sampler, draw_all, rank_all, token_logprobs
from headrace.sampling.typical import verify_typical

VERIFIERS: dict[AcceptanceMethod, Verifier] = {"exact": verify_exact, "rejection": verify_rejection, "typical": verify_typical}
"""Acceptance methods by the names of `EngineConfig.acceptance_method`."""

Logits = NDArray[np.float32]  # [rows, vocab]
_CALLER = Pool(1)
"""A pool of the calling thread alone."""


def run_logit_ops(ops: Sequence[LogitOp], logits: Logits, pool: Pool = _CALLER) -> list[LogitOpResult]:
    """The result of each op, in order, computed by the threads of the pool. An `Expand` overwrites its row: no other op may read it."""
    results: list[LogitOpResult] = [None] * len(ops)
    verifications: dict[AcceptanceMethod, dict[int, Verification]] = {}
    rankings: dict[int, TopTokens] = {}
    expansions: dict[int, Expand] = {}
    for i, op in enumerate(ops):
        if isinstance(op, Draw):
            verifications.setdefault(op.method, {})[i] = Verification(op, cast(Sampler, op.sampler), op.position)
        elif isinstance(op, Score):
            results[i] = _score(op, logits)
        elif isinstance(op, TopTokens):
            rankings[i] = op
        else:
            expansions[i] = op
    for method, same in verifications.items():
        VERIFIERS[method](list(same.values()), logits, pool)
        for i, verification in same.items():
            results[i] = verification.drawn
    for i, ranked in zip(rankings, _rank(list(rankings.values()), logits, pool), strict=True):
        results[i] = ranked
    for i, expanded in zip(expansions, _expand(list(expansions.values()), logits, pool), strict=True):
        results[i] = expanded
    return results


def with_tokens(batch: RaggedBatch, values: Sequence[LogitOpResult]) -> RaggedBatch:
    """The batch with its pending tokens filled in from `values`, the results of the launch before.

    An op that met logits that are not finite gives token 0; what is computed from it is ignored.
    """
    if batch.token_source is None:
        return batch
    drawn = np.array([value.tokens[-1] if isinstance(value, Drawn) else 0 for value in values], np.int32)
    pending = batch.token_source >= 0
    tokens = np.where(pending, drawn[np.where(pending, batch.token_source, 0)], batch.tokens)
    return batch._replace(tokens=tokens, token_source=None)


def _score(op: Score, logits: Logits) -> TokenLogprobs | None:
    try:
        return token_logprobs(logits[op.row], op.token, op.num_logprobs)
    except NonFiniteLogitsError:
        return None


def _rank(ops: list[TopTokens], logits: Logits, pool: Pool) -> list[Ranked | None]:
    if not ops:
        return []
    ranked = rank_all(pool, logits, [(cast(Sampler, op.sampler), op.row, op.position, op.num_tokens) for op in ops])
    return [None if found is None else Ranked(*found) for found in ranked]


def _expand(ops: list[Expand], logits: Logits, pool: Pool) -> list[Expanded | None]:
    """Draw one token of each op at a time; a drawn token's logit becomes -inf, so that the next draw there gives the next best token."""
    probabilities = [_probabilities(op, logits) for op in ops]
    initial = [cast(Sampler, op.sampler).clone(op.seq_index) if op.width > 1 else None for op in ops]
    tokens: list[list[int]] = [[] for _ in ops]
    for rank in range(max((op.width for op in ops), default=0)):
        turn = [i for i, op in enumerate(ops) if op.width > rank]
        samplers = [cast(Sampler, initial[i] if rank else ops[i].sampler) for i in turn]
        draws = [(s.clone(ops[i].seq_index) if rank else s, ops[i].row, ops[i].position, -1) for i, s in zip(turn, samplers, strict=True)]
        for i, drawn in zip(turn, draw_all(pool, logits, draws), strict=True):
            if drawn is not None:
                tokens[i].append(drawn[0])
                logits[ops[i].row, drawn[0]] = -np.inf
    return [Expanded(found, p) if found else None for found, p in zip(tokens, probabilities, strict=True)]


def _probabilities(op: Expand, logits: Logits) -> NDArray[np.float64] | None:
    if not op.probabilities:
        return None
    try:
        return cast(Sampler, op.sampler).probabilities(logits[op.row], op.position)
    except NonFiniteLogitsError:
        return None  # the draw meets the same logits, so the op has no result
