"""Rejection sampling of draft chains (Leviathan et al. 2023; Chen et al. 2023).

A draft token x from q is accepted with probability min(1, p(x) / q(x)), else a token is sampled
from the residual. Every token has the target's distribution p, but the tokens depend on the
drafts and thus on the batch.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.errors import NonFiniteLogitsError
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.sampler import NativeSample, with_logprobs
from headrace.sampling.verification import Logits, Verification

Distribution = NDArray[np.float64]  # [vocab]


def verify_rejection(
    ops: Sequence[SampleOp], logits: Logits, pool: Pool
) -> list[SampleResult | None]:
    """A `Verifier` of chains. Without probabilities, q = 1 for the draft's token."""
    return [_verify(op, logits) for op in ops]


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The residual distribution max(p - q, 0), normalised."""
    excess = np.maximum(p - q, 0)
    mass = excess.sum()
    return excess / mass if mass > 0 else p  # p and q differ by rounding only


def pick(p: Distribution, uniform: float) -> int:
    """The token at which the cumulative distribution passes `uniform`, in (0, 1)."""
    cumulative = np.cumsum(p)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(p)[-1]))  # rounding may pass the last possible token


def _verify(op: SampleOp, logits: Logits) -> SampleResult | None:
    verification = Verification(op)
    try:
        while verification.take(_next(verification, logits[verification.row])):
            pass
    except NonFiniteLogitsError:
        return None
    return verification.result


def _next(verification: Verification, row: NDArray[np.float32]) -> NativeSample:
    sampler, draft = verification.sampler, verification.op.draft
    p = sampler.probabilities(row, verification.position, verification.masks)
    accept_uniform, pick_uniform = sampler.uniforms(verification.position)
    if draft.probabilities is None or verification.node not in draft.parents:
        token = pick(p, pick_uniform)
    else:
        child = draft.parents.index(verification.node)
        q, token = draft.probabilities[child], draft.tokens[child]
        if accept_uniform * q[token] >= p[token]:
            token = pick(residual(p, q), pick_uniform)
    sampler.append(token)
    return with_logprobs(row, token, verification.op.num_logprobs)
