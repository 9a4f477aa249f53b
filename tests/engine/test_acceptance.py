"""Acceptance rates, learned from drafts and the tokens that followed."""

import random

import pytest

from headrace.batch import DraftTree
from headrace.engine.acceptance import AcceptanceRates

CHAIN = DraftTree([1, 2, 3], [-1, 0, 1])


def test_a_new_proposer_is_expected_to_be_right_half_the_time() -> None:
    assert AcceptanceRates().values(CHAIN) == [0.5, 0.25, 0.125]
    assert AcceptanceRates().values(DraftTree([1, 2], [-1, -1])) == [0.5, 0.125]


def test_rates_are_learned_by_depth() -> None:
    acceptance, rng = AcceptanceRates(), random.Random(0)
    for _ in range(3000):
        tokens = [1 if rng.random() < 0.8 else 9, 2 if rng.random() < 0.4 else 9, 3]
        acceptance.record(CHAIN, tokens)
    first, second, third = acceptance.values(CHAIN)
    assert first == pytest.approx(0.8, abs=0.15) and second / first == pytest.approx(0.4, abs=0.2) and third / second > 0.7


def test_confidence_and_rank_have_rates_of_their_own() -> None:
    acceptance = AcceptanceRates()
    fork = DraftTree([1, 2], [-1, -1], confidence=1)
    for _ in range(50):
        acceptance.record(fork, [2])
    first, second = acceptance.values(fork)
    assert first < 0.05 and second > 0.9
    assert acceptance.values(CHAIN)[0] == 0.5


def test_nodes_beyond_the_known_tokens_are_not_counted() -> None:
    acceptance = AcceptanceRates()
    acceptance.record(CHAIN, [])
    assert acceptance.values(CHAIN) == [0.5, 0.25, 0.125]
    acceptance.record(CHAIN, [1])
    first, second, _ = acceptance.values(CHAIN)
    assert first > 0.5 and second / first == pytest.approx(first)  # the second depth has no observations, so its rate is that of the first


def test_rates_of_a_sequence_start_from_those_of_all_sequences() -> None:
    general = AcceptanceRates()
    other, mine = AcceptanceRates(general), AcceptanceRates(general)
    for _ in range(100):
        other.record(CHAIN, [1, 2, 3])
    assert mine.values(CHAIN)[0] > 0.9
    for _ in range(20):
        mine.record(CHAIN, [9])
    assert mine.values(CHAIN)[0] < 0.3 < other.values(CHAIN)[0]


def test_no_node_is_likelier_than_its_parent() -> None:
    acceptance, rng = AcceptanceRates(), random.Random(1)
    draft = DraftTree([1, 2, 1, 2, 3], [-1, -1, 0, 0, 2])
    for _ in range(200):
        acceptance.record(draft, [rng.choice([1, 2]), rng.choice([1, 2, 3]), 3])
        values = acceptance.values(draft)
        assert all(parent < 0 or value <= values[parent] for value, parent in zip(values, draft.parents, strict=True))
