"""Typical acceptance (Cai et al. 2024, Medusa): lossy, for more speed at the price of the target's
distribution.

A draft token is accepted if the target finds it likely enough: p(x) > min(epsilon, delta
exp(-H(p))), where H is the entropy of p, so the threshold is lower where many tokens are possible.
The longest accepted path is kept, and a plain draw follows it. At temperature 0 only the likeliest
token is accepted, as by exact verification.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.batch import NO_DRAFT
from headrace.errors import NonFiniteLogitsError
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.sampler import Sampler, scored
from headrace.sampling.verification import Logits, Verification, masks_behind

_EPSILON = 0.09
"""Probability above which any token is accepted."""
_DELTA = 0.3
"""Share of exp(-entropy), the probability of a typical token, above which a token is accepted."""


def verify_typical(
    draws: Sequence[SampleOp], logits: Logits, pool: Pool
) -> list[SampleResult | None]:
    """The longest accepted path of each tree and a draw after it: a `Verifier`."""
    return [_verify(draw, logits) for draw in draws]


def _verify(draw: SampleOp, logits: Logits) -> SampleResult | None:
    verification = Verification(draw)
    sampler = verification.sampler
    try:
        for node in _longest(draw, logits, sampler, -1, draw.position):
            token = draw.draft.tokens[node]
            sampler.append(token)
            verification.take(scored(logits[verification.row], token, draw.num_logprobs))
        verification.draw = draw._replace(draft=NO_DRAFT)  # the path ends here, whatever is drawn
        verification.take(
            sampler.draw(
                logits[verification.row],
                verification.position,
                draw.num_logprobs,
                verification.masks,
            )
        )
    except NonFiniteLogitsError:
        return None
    return verification.drawn


def _longest(
    draw: SampleOp, logits: Logits, sampler: Sampler, node: int, position: int
) -> list[int]:
    """The longest path of accepted draft nodes below `node`; the first of equal length. `position`
    is that of its first token.
    """
    draft = draw.draft
    children = [child for child, parent in enumerate(draft.parents) if parent == node]
    if not children:
        return []
    p = sampler.probabilities(logits[draw.row + 1 + node], position, masks_behind(draw, node))
    longest: list[int] = []
    for child in _first_of_each_token(draft.tokens, children):
        token = draft.tokens[child]
        if p[token] > _threshold(p):
            after = sampler.clone(0)  # for its penalties; its noise is not used
            after.append(token)
            longest = max(
                longest, [child, *_longest(draw, logits, after, child, position + 1)], key=len
            )
    return longest


def _first_of_each_token(tokens: list[int], children: list[int]) -> list[int]:
    """The first child with each token."""
    first: dict[int, int] = {}
    for child in children:
        first.setdefault(tokens[child], child)
    return list(first.values())


def _threshold(p: NDArray[np.float64]) -> float:
    """The probability that an accepted token must exceed, by the distribution p [vocab]."""
    possible = p[p > 0]
    entropy = -float(np.sum(possible * np.log(possible)))
    return min(_EPSILON, _DELTA * float(np.exp(-entropy)))
