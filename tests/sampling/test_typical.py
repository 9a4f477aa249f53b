"""Typical acceptance: the threshold of a token's probability, and the longest path."""

import math

import numpy as np
import pytest

from headrace.batch import DraftTree
from headrace.config import AcceptanceMethod
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.host import run_logit_ops
from headrace.sampling.sampler import Sampler

VOCAB = 8


def logits_of(*rows: list[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float32))


def accepted(draft: DraftTree, *rows: list[float], **sampling: float) -> list[int]:
    return path("typical", draft, *rows, **sampling)


def path(
    method: AcceptanceMethod, draft: DraftTree, *rows: list[float], **sampling: float
) -> list[int]:
    (drawn,) = run_logit_ops(
        [SampleOp(0, 0, Sampler(VOCAB, [], **sampling), draft, 2, method)], logits_of(*rows)
    )
    assert (
        isinstance(drawn, SampleResult)
        and len(drawn.tokens) == len(drawn.logprobs) == len(drawn.path) + 1
    )
    assert drawn.tokens[:-1] == [draft.tokens[node] for node in drawn.path]
    return drawn.path


SURE = [0.93, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01]
FLAT = [1 / 8] * 8


@pytest.mark.parametrize(
    ("row", "token", "expected"), [(SURE, 0, True), (SURE, 1, False), (FLAT, 5, True)]
)
def test_the_threshold_falls_with_entropy(row: list[float], token: int, expected: bool) -> None:
    entropy = -sum(p * math.log(p) for p in row)
    assert expected == (row[token] > min(0.09, 0.3 * math.exp(-entropy)))
    assert accepted(DraftTree([token], [-1]), row, FLAT) == ([0] if expected else [])


def test_the_longest_path_is_kept() -> None:
    draft = DraftTree([0, 1, 2, 3], [-1, -1, 1, 2])
    assert accepted(draft, FLAT, FLAT, FLAT, FLAT, FLAT) == [1, 2, 3]
    assert accepted(draft, FLAT, FLAT, SURE, FLAT, FLAT) == [
        0
    ]  # token 2 is unlikely after 1, and the first of equal paths is kept


def test_greedy_typical_acceptance_is_exact() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows = rng.dirichlet(np.ones(VOCAB), 4).tolist()
        draft = DraftTree(rng.integers(0, 3, 3).tolist(), [-1, 0, 0])
        assert accepted(draft, *rows, temperature=0.0) == path(
            "exact", draft, *rows, temperature=0.0
        )


def test_penalties_apply_to_accepted_tokens() -> None:
    """A repeated token is likely until it is penalised."""
    draft, row = DraftTree([0, 0, 0], [-1, 0, 1]), [0.3, *[0.1] * 7]
    assert accepted(draft, row, row, row, row) == [0, 1, 2]
    assert accepted(draft, row, row, row, row, frequency_penalty=3.0) == [0]
