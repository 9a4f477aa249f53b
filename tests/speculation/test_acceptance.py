"""Acceptance rates, learned from drafts and the tokens that follow them."""

import random

import pytest

from headrace.batch import DraftTree
from headrace.speculation.acceptance import AcceptanceRates

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
    assert (
        first == pytest.approx(0.8, abs=0.15)
        and second / first == pytest.approx(0.4, abs=0.2)
        and third / second > 0.7
    )


def test_rates_are_learned_by_confidence_and_rank() -> None:
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
    assert first > 0.5 and second / first == pytest.approx(
        first
    )  # the second depth has no observations, so its rate is that of the first


def test_rates_on_a_sequence_start_from_the_general_rates() -> None:
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
        assert all(
            parent < 0 or value <= values[parent]
            for value, parent in zip(values, draft.parents, strict=True)
        )


def test_acceptance_rates_of_a_few_drafts_by_hand() -> None:
    """The prior counts as three observations, and the weight of older observations decays."""
    general = AcceptanceRates(prior=(0.5, 0.75))
    assert [general.values(DraftTree([1], [-1], confidence))[0] for confidence in range(4)] == [
        0.5,
        0.75,
        0.75,
        0.75,
    ]
    assert general.values(DraftTree([1, 2, 3, 4, 5], [-1] * 5)) == [
        0.5,
        0.5 / 4,
        0.5 / 9,
        0.5 / 9,
        0.5 / 9,
    ]
    general.record(CHAIN, [1, 9, 3])
    first, second = 2.5 / 4, 3 * 2.5 / 4 / 4
    assert general.values(CHAIN) == [first, first * second, first * second * second]
    own = AcceptanceRates(general)
    for token in (1, 9):
        own.record(DraftTree([1], [-1]), [token])
    expected = ((1 * 0.98 + 1) * 0.98 + 3 * 0.5) / ((1 * 0.98 + 1) * 0.98 + 1 + 3)
    assert general.rate((0, 1, 0)) == pytest.approx(expected)
    assert own.rate((0, 1, 0)) == pytest.approx((0.9 + 3 * expected) / (1.9 + 3))


def test_nodes_below_a_wrong_node_are_not_counted() -> None:
    acceptance = AcceptanceRates()
    acceptance.record(DraftTree([1, 2, 3, 4, 5], [-1, -1, 1, 2, 0]), [9, 3, 4])
    assert [acceptance.rate((0, depth, 0)) for depth in (1, 2, 3)] == [1.5 / 4] * 3
    acceptance.record(DraftTree([1, 2, 3, 4], [-1, -1, 0, 1]), [2, 4])
    assert (
        acceptance.rate((0, 2, 0)) == (1 + 3 * acceptance.rate((0, 1, 0))) / 4
    )  # node 3, below node 1


def test_deep_nodes_share_one_rate() -> None:
    acceptance, tokens = AcceptanceRates(prior=(0.8,)), list(range(9))
    acceptance.record(DraftTree(tokens, list(range(-1, 8))), [*tokens[:6], 99])
    assert acceptance.rate((0, 5, 0)) > 0.85 > acceptance.rate((0, 6, 0))
    values = acceptance.values(DraftTree(tokens, list(range(-1, 8))))
    assert (
        values[7] / values[6] == values[6] / values[5] == pytest.approx(acceptance.rate((0, 6, 0)))
    )


def test_a_confidence_of_a_node_stands_for_its_rank() -> None:
    """Rates by depth and rank alone are learned, too."""
    acceptance = AcceptanceRates(prior=(0.5, 0.1, 0.9))
    assert not acceptance.is_by_node
    draft = DraftTree([1, 2, 3], [-1, -1, 0], confidence=[1, 2, 2])
    assert acceptance.values(draft) == pytest.approx([0.1, 0.9, 0.09])
    own = AcceptanceRates(acceptance)
    for _ in range(50):
        own.record(draft, [2])
    assert own.is_by_node and acceptance.is_by_node
    first, second, third = acceptance.values(draft)
    assert first < 0.02 and second > 0.95 and third == pytest.approx(first * second, rel=0.05)
    assert acceptance.rate((0, 1, 0)) < 0.1 and acceptance.rate((0, 1, 1)) > 0.9
    assert acceptance.rate((1, 1, 1)) == pytest.approx(0.1 / 4)  # never observed
