"""Typical acceptance: how likely a token must be, and that the longest path is kept."""

import math

import numpy as np
import pytest

from headrace import _native
from headrace.accept.descend import Descent, descend
from headrace.accept.sampler import Sampler
from headrace.accept.typical import typical
from headrace.batch import Commit, Guess

POOL = _native.Pool(1)
VOCAB = 8


def logits_of(*rows: list[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float32))


def accepted(guess: Guess, *rows: list[float], **sampling: float) -> list[int]:
    descent = Descent(Commit(0, [], [], []), Sampler(VOCAB, [], **sampling), guess, 0, 0, 2)
    assert typical([descent], logits_of(*rows), POOL) == set()
    commit = descent.commit
    assert len(commit.tokens) == len(commit.logprobs) == len(commit.path) + 1
    assert commit.tokens[:-1] == [guess.tokens[node] for node in commit.path]
    return commit.path


SURE = [0.93, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01]
FLAT = [1 / 8] * 8


@pytest.mark.parametrize(("row", "token", "survives"), [(SURE, 0, True), (SURE, 1, False), (FLAT, 5, True)])
def test_where_more_is_possible_less_is_asked(row: list[float], token: int, survives: bool) -> None:
    entropy = -sum(p * math.log(p) for p in row)
    assert survives == (row[token] > min(0.09, 0.3 * math.exp(-entropy)))
    assert accepted(Guess([token], [-1]), row, FLAT) == ([0] if survives else [])


def test_the_longest_path_is_kept() -> None:
    guess = Guess([0, 1, 2, 3], [-1, -1, 1, 2])
    assert accepted(guess, FLAT, FLAT, FLAT, FLAT, FLAT) == [1, 2, 3]
    assert accepted(guess, FLAT, FLAT, SURE, FLAT, FLAT) == [0]  # 2 is unlikely after 1, and of equal paths the first is kept


def test_greedy_loses_nothing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows = rng.dirichlet(np.ones(VOCAB), 4).tolist()
        guess = Guess(rng.integers(0, 3, 3).tolist(), [-1, 0, 0])
        plain = Descent(Commit(0, [], [], []), Sampler(VOCAB, [], temperature=0.0), guess, 0, 0, 2)
        assert descend([plain], logits_of(*rows), POOL) == set()
        assert accepted(guess, *rows, temperature=0.0) == plain.commit.path


def test_penalties_count_on_the_way_down() -> None:
    """The same token again and again is likely until it is penalised."""
    guess, row = Guess([0, 0, 0], [-1, 0, 1]), [0.3, *[0.1] * 7]
    assert accepted(guess, row, row, row, row) == [0, 1, 2]
    assert accepted(guess, row, row, row, row, frequency_penalty=3.0) == [0]
