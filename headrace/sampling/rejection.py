"""Rejection sampling of drafted chains (Leviathan et al. 2023; Chen et al. 2023): lossless in
distribution.

A draft token x that was drawn from q is accepted with probability min(1, p(x) / q(x)); otherwise a
token is drawn from the residual distribution, max(p - q, 0) normalised. After a chain that is
accepted to its end one more token is drawn from p: the bonus token. Every token then has the
target's distribution. Which tokens are drawn depends on the drafts, and so on the other sequences
of the batch; only exact verification gives the same tokens every time.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.errors import NonFiniteLogitsError
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.sampler import NativeDraw, scored
from headrace.sampling.verification import Logits, Verification

Distribution = NDArray[np.float64]  # [vocab]


def verify_rejection(
    draws: Sequence[SampleOp], logits: Logits, pool: Pool
) -> list[SampleResult | None]:
    """The results of draws with chains, by rejection sampling: a `Verifier`.

    A draft without probabilities counts as certain (q is 1 for its token), so its token is accepted
    if a plain draw gives it.
    """
    return [_verify(draw, logits) for draw in draws]


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The residual distribution max(p - q, 0), normalised: that of the token in place of a rejected
    draft token.
    """
    beyond = np.maximum(p - q, 0)
    mass = beyond.sum()
    return beyond / mass if mass > 0 else p  # they differ by rounding only


def pick(p: Distribution, uniform: float) -> int:
    """The token at which the cumulative distribution passes `uniform`, in (0, 1)."""
    cumulative = np.cumsum(p)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(p)[-1]))  # rounding may lead past the last possible token


def _verify(draw: SampleOp, logits: Logits) -> SampleResult | None:
    verification = Verification(draw)
    try:
        while verification.take(_next(verification, logits[verification.row])):
            pass
    except NonFiniteLogitsError:
        return None
    return verification.drawn


def _next(verification: Verification, row: NDArray[np.float32]) -> NativeDraw:
    """The next token by its row of logits [vocab]: the draft token, or one in its place."""
    sampler, draft = verification.sampler, verification.draw.draft
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
    return scored(row, token, verification.draw.num_logprobs)
