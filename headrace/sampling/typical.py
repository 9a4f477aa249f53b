"""Typical acceptance (Cai et al. 2024, Medusa): lossy, for callers who want speed more than the target's distribution.

A draft token survives if the target finds it likely enough: p(x) > min(0.09, 0.3 exp(-H(p))), with H the entropy of p, so that where
much is possible, less is asked of a token. The longest path that survives is kept; what follows it is a plain draw. At temperature 0
only the likeliest token survives, and nothing is lost.
"""

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.batch import NO_DRAFT
from headrace.errors import NonFiniteLogitsError
from headrace.sampling.exact import Verification
from headrace.sampling.sampler import Sampler, scored

_EPSILON = 0.09
_DELTA = 0.3


def verify_typical(verifications: list[Verification], logits: NDArray[np.float32], pool: Pool) -> None:
    """Take the longest path of each tree that is likely enough, then draw. A `Verifier`."""
    for verification in verifications:
        try:
            draw = verification.draw
            for node in _longest(verification, logits, verification.sampler, -1, verification.position):
                token = draw.draft.tokens[node]
                verification.sampler.append(token)
                verification.take(scored(logits[verification.row], token, draw.num_logprobs))
            verification.draw = draw._replace(draft=NO_DRAFT)  # the path ends here, whatever is drawn
            verification.take(verification.sampler.draw(logits[verification.row], verification.position, draw.num_logprobs))
        except NonFiniteLogitsError:
            verification.failed = True


def _longest(verification: Verification, logits: NDArray[np.float32], sampler: Sampler, node: int, position: int) -> list[int]:
    """The longest path of draft nodes below `node` that survive; of equal ones the first."""
    draft = verification.draw.draft
    children = [child for child, parent in enumerate(draft.parents) if parent == node]
    if not children:
        return []
    p = sampler.probabilities(logits[verification.draw.row + 1 + node], position)
    longest: list[int] = []
    for child in _first_of_each_token(draft.tokens, children):
        token = draft.tokens[child]
        if p[token] > _threshold(p):
            after = sampler.clone(0)  # only its penalties matter here, not its noise
            after.append(token)
            longest = max(longest, [child, *_longest(verification, logits, after, child, position + 1)], key=len)
    return longest


def _first_of_each_token(tokens: list[int], children: list[int]) -> list[int]:
    first: dict[int, int] = {}
    for child in children:
        first.setdefault(tokens[child], child)
    return list(first.values())


def _threshold(p: NDArray[np.float64]) -> float:
    possible = p[p > 0]
    entropy = -float(np.sum(possible * np.log(possible)))
    return min(_EPSILON, _DELTA * float(np.exp(-entropy)))
