"""Typical acceptance (Cai et al. 2024, Medusa): lossy, for whoever wants speed more than the target's distribution.

A draft survives if the target finds it likely enough: p(x) > min(0.09, 0.3 exp(-H(p))), with H the entropy of p, so that where much
is possible, less is asked of a token. The longest path that survives is kept; what follows it is a plain draw. At temperature 0 only
the likeliest token survives, and nothing is lost.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.accept.exact import Verification
from headrace.accept.sampler import Pool, Sampler, scored
from headrace.errors import NonFiniteLogitsError

_EPSILON = 0.09
_DELTA = 0.3


def verify_typical(verifications: list[Verification], logits: NDArray[np.float32], pool: Pool) -> set[int]:
    """Take the longest path of each tree that is likely enough, then draw. A `Rule`."""
    failed: set[int] = set()
    for verification in verifications:
        try:
            for node in _longest(verification, logits, verification.sampler, -1, verification.position):
                token = verification.draft.tokens[node]
                verification.sampler.append(token)
                verification.take(scored(logits[verification.row + 1 + verification.node], token, verification.num_logprobs))
            row = logits[verification.row + 1 + verification.node]
            draft, verification.draft = (
                verification.draft,
                verification.draft._replace(tokens=[], parents=[]),
            )  # the path ends here, whatever is drawn
            verification.take(verification.sampler.draw(row, verification.position, verification.num_logprobs))
            verification.draft = draft
        except NonFiniteLogitsError:
            failed.add(verification.commit.source)
    return failed


def _longest(verification: Verification, logits: NDArray[np.float32], sampler: Sampler, node: int, position: int) -> list[int]:
    """The longest path of drafts below `node` that survive; of equal ones the first."""
    children = [child for child, parent in enumerate(verification.draft.parents) if parent == node]
    if not children:
        return []
    p = sampler.probabilities(logits[verification.row + 1 + node], position)
    longest: list[int] = []
    for child in _first_of_each_token(verification, children):
        token = verification.draft.tokens[child]
        if p[token] > _threshold(p):
            after = sampler.clone(0)  # only its penalties matter here, not its noise
            after.append(token)
            longest = max(longest, [child, *_longest(verification, logits, after, child, position + 1)], key=len)
    return longest


def _first_of_each_token(verification: Verification, children: list[int]) -> list[int]:
    first: dict[int, int] = {}
    for child in children:
        first.setdefault(verification.draft.tokens[child], child)
    return list(first.values())


def _threshold(p: NDArray[np.float64]) -> float:
    possible = p[p > 0]
    entropy = -float(np.sum(possible * np.log(possible)))
    return min(_EPSILON, _DELTA * float(np.exp(-entropy)))
