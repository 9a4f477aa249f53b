"""Typical acceptance: lossy, and faster than exact verification (Cai et al. 2024, Medusa).

A draft token x is accepted if p(x) > min(epsilon, delta exp(-H(p))), with the entropy H. At
temperature 0 it equals exact verification.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.batch import NO_DRAFT
from headrace.errors import NonFiniteLogitsError
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.sampler import Sampler, with_logprobs
from headrace.sampling.verification import Logits, Verification, masks_after

_EPSILON = 0.09
"""Any token above this probability is accepted."""
_DELTA = 0.3
"""Share of exp(-entropy)."""


def verify_typical(
    ops: Sequence[SampleOp], logits: Logits, pool: Pool
) -> list[SampleResult | None]:
    """Keeps the longest accepted path of each tree and samples after it."""
    return [_verify(op, logits) for op in ops]


def _verify(op: SampleOp, logits: Logits) -> SampleResult | None:
    verification = Verification(op)
    sampler = verification.sampler
    try:
        for node in _longest_path(op, logits, sampler, -1, op.position):
            token = op.draft.tokens[node]
            sampler.append(token)
            verification.take(with_logprobs(logits[verification.row], token, op.num_logprobs))

        # The path ends here, even if the sample is the token of a child node.
        verification.op = op._replace(draft=NO_DRAFT)
        row = logits[verification.row]
        verification.take(
            sampler.draw(row, verification.position, op.num_logprobs, verification.masks)
        )
    except NonFiniteLogitsError:
        return None
    return verification.result


def _longest_path(
    op: SampleOp, logits: Logits, sampler: Sampler, node: int, position: int
) -> list[int]:
    draft = op.draft
    children = [child for child, parent in enumerate(draft.parents) if parent == node]
    if not children:
        return []
    p = sampler.probabilities(logits[op.row + 1 + node], position, masks_after(op, node))
    threshold = _threshold(p)
    longest: list[int] = []
    for child in _first_of_each_token(draft.tokens, children):
        token = draft.tokens[child]
        if p[token] > threshold:
            after = sampler.clone(0)  # for its penalties; its noise is not used
            after.append(token)
            path = [child, *_longest_path(op, logits, after, child, position + 1)]
            longest = max(longest, path, key=len)
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
