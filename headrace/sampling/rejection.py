"""Rejection sampling of drafted chains (Leviathan et al. 2023; Chen et al. 2023): lossless in distribution.

A draft token x that was drawn from q survives with probability min(1, p(x) / q(x)); where it does not, the token comes from what p
has beyond q, normalised. Behind the last draft token that survives one more is drawn from p: the bonus token. Every token then has
the target's distribution. Which tokens they are depends on the drafts, and so on what else is in the batch: for the same tokens each
time there is exact verification.
"""

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.errors import NonFiniteLogitsError
from headrace.sampling.exact import Verification
from headrace.sampling.sampler import NativeDraw, scored

Distribution = NDArray[np.float64]  # [vocab]


def verify_rejection(verifications: list[Verification], logits: NDArray[np.float32], pool: Pool) -> None:
    """Go down the chain of each as long as its draft tokens survive. A `Verifier`.

    A draft token without probabilities was certain (q is 1 there): it survives if a plain draw gives it.
    """
    for verification in verifications:
        try:
            while verification.take(_next(verification, logits[verification.row])):
                pass
        except NonFiniteLogitsError:
            verification.failed = True


def residual(p: Distribution, q: Distribution) -> Distribution:
    """What p has beyond q, normalised: the distribution of the token in place of a draft token that did not survive."""
    beyond = np.maximum(p - q, 0)
    mass = beyond.sum()
    return beyond / mass if mass > 0 else p  # they differ by rounding only


def pick(p: Distribution, uniform: float) -> int:
    """The token at this place of the cumulated distribution."""
    cumulated = np.cumsum(p)
    token = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
    return min(token, int(np.flatnonzero(p)[-1]))  # rounding may lead beyond the last that can be


def _next(verification: Verification, row: NDArray[np.float32]) -> NativeDraw:
    sampler, draft = verification.sampler, verification.draw.draft
    p = sampler.probabilities(row, verification.position)
    survive, place = sampler.uniforms(verification.position)
    if draft.probabilities is None or verification.node not in draft.parents:
        token = pick(p, place)
    else:
        child = draft.parents.index(verification.node)
        q, token = draft.probabilities[child], draft.tokens[child]
        if survive * q[token] >= p[token]:
            token = pick(residual(p, q), place)
    sampler.append(token)
    return scored(row, token, verification.draw.num_logprobs)
