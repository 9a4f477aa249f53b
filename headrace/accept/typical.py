"""Typical acceptance (Cai et al. 2024, Medusa): lossy, for whoever wants speed more than the target's distribution.

A guess survives if the target finds it likely enough: p(x) > min(0.09, 0.3 exp(-H(p))), with H the entropy of p, so that where much
is possible, less is asked of a token. The longest path that survives is kept; what follows it is a plain draw. At temperature 0 only
the likeliest token survives, and nothing is lost.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.accept.descend import Descent
from headrace.accept.sampler import Pool, Sampler, scored
from headrace.errors import NonFiniteLogitsError

_EPSILON = 0.09
_DELTA = 0.3


def typical(descents: list[Descent], logits: NDArray[np.float32], pool: Pool) -> set[int]:
    """Take the longest path of each tree that is likely enough, then draw. A `Rule`."""
    failed: set[int] = set()
    for descent in descents:
        try:
            for node in _longest(descent, logits, descent.sampler, -1, descent.position):
                token = descent.guess.tokens[node]
                descent.sampler.append(token)
                descent.take(scored(logits[descent.row + 1 + descent.node], token, descent.num_logprobs))
            row = logits[descent.row + 1 + descent.node]
            guess, descent.guess = descent.guess, descent.guess._replace(tokens=[], parents=[])  # the path ends here, whatever is drawn
            descent.take(descent.sampler.draw(row, descent.position, descent.num_logprobs))
            descent.guess = guess
        except NonFiniteLogitsError:
            failed.add(descent.commit.source)
    return failed


def _longest(descent: Descent, logits: NDArray[np.float32], sampler: Sampler, node: int, position: int) -> list[int]:
    """The longest path of guesses below `node` that survive; of equal ones the first."""
    children = [child for child, parent in enumerate(descent.guess.parents) if parent == node]
    if not children:
        return []
    p = sampler.probabilities(logits[descent.row + 1 + node], position)
    longest: list[int] = []
    for child in _first_of_each_token(descent, children):
        token = descent.guess.tokens[child]
        if p[token] > _threshold(p):
            after = sampler.clone(0)  # only its penalties matter here, not its noise
            after.append(token)
            longest = max(longest, [child, *_longest(descent, logits, after, child, position + 1)], key=len)
    return longest


def _first_of_each_token(descent: Descent, children: list[int]) -> list[int]:
    first: dict[int, int] = {}
    for child in children:
        first.setdefault(descent.guess.tokens[child], child)
    return list(first.values())


def _threshold(p: NDArray[np.float64]) -> float:
    possible = p[p > 0]
    entropy = -float(np.sum(possible * np.log(possible)))
    return min(_EPSILON, _DELTA * float(np.exp(-entropy)))
