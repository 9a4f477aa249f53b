"""The estimated cost of a step by its rows, learned from noisy measurements."""

import random
from collections.abc import Callable
from itertools import pairwise
from math import exp, log2

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.speculation.step_cost import StepCost

ROWS = [1, 1, 1, 2, 3, 5, 9, 17, 32, 48, 64]


def flat_then_steep(rows: int) -> float:
    return max(2.5e-3, 3e-4 + 4.5e-4 * rows)


def learned(true: Callable[[int], float], steps: int, noise: float, drift: float = 0.0) -> StepCost:
    """An estimate after `steps` steps.

    With `drift` the machine is slower by that share in every other run of 50 steps.
    """
    cost, rng = StepCost(), random.Random(0)
    for step in range(steps):
        rows = rng.choice(ROWS)
        spike = 20 if noise and rng.random() < 0.02 else 1
        cost.record(
            rows, true(rows) * (1 + noise * rng.random()) * spike * (1 + drift * (step // 50 % 2))
        )
    return cost


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.05), (0.4, 0.2)])
def test_the_curve_is_learned_from_noisy_steps(noise: float, tolerance: float) -> None:
    cost = learned(flat_then_steep, 600, noise)
    for rows in set(ROWS) - {1}:
        expected = flat_then_steep(rows) / flat_then_steep(1)
        assert cost.seconds(rows) / cost.seconds(1) == pytest.approx(expected, rel=tolerance)


def test_changes_of_the_machines_speed_do_not_bend_the_curve() -> None:
    cost = learned(flat_then_steep, 600, 0.1, drift=1.0)
    for rows in (5, 17, 64):
        assert cost.seconds(rows) / cost.seconds(1) == pytest.approx(
            flat_then_steep(rows) / flat_then_steep(1), rel=0.25
        )


def test_there_is_no_estimate_before_the_first_valid_measurement() -> None:
    cost = StepCost()
    assert cost.visits(1) == 0 and cost.seconds(5) == 0
    cost.record(0, 1.0)
    cost.record(1, 0.0)
    assert cost.visits(1) == 0
    cost.record(1, 2e-3)
    assert cost.seconds(1) == pytest.approx(2e-3) and cost.seconds(2) > 2e-3


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 1e3)), min_size=1, max_size=40))
@example([(513, 1.0), (1, 1.0), (57, 3.0), (76, 8.0)])
def test_more_rows_never_cost_less(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for rows, seconds in steps:
        cost.record(rows, seconds)
    times = [cost.seconds(rows) for rows in (1, 2, 3, 5, 8, 13, 100, 1000, 4096, 10**6)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times)) and times[0] > 0


def test_measurements_between_two_knots_count_for_both() -> None:
    cost = StepCost()
    for rows in (1, 1, 3, 3):
        cost.record(rows, 1e-3)
    after = 2 * log2(3) - 3
    assert cost.visits(1) == 2 and cost.visits(2) == 0
    assert cost.visits(3) == pytest.approx(2) and cost.visits(4) == pytest.approx(2 * after)
    cost.record(10**6, 1e-3)
    assert cost.visits(4096) == 1


def test_outside_the_measured_knots_the_default_curve_holds() -> None:
    cost = StepCost()
    for _ in range(300):
        cost.record(4, 1e-3)
        cost.record(64, 9e-3)
    assert cost.seconds(1) / cost.seconds(4) == pytest.approx(1.1 / 1.4)
    assert cost.seconds(16) == pytest.approx(3e-3, rel=1e-3)  # half way in logarithms
    assert cost.seconds(256) / cost.seconds(64) == pytest.approx(26.6 / 7.4)


def test_one_measurement_moves_the_estimate_by_a_bounded_step() -> None:
    """Very large errors count as 2 at the first visit of a knot and as 0.5 later, as logarithms."""
    cost = StepCost()
    cost.record(1, 1e-3)
    first = cost.seconds(64)
    moved, far = 0.0, first * exp(9)
    for change in (
        2 / 1.5,
        0.5 / 2.5 + 0.02,
        0.5 / 3.5 + 0.02,
    ):  # as in a mean; and the scale, as soon as the knot is known
        cost.record(64, far)
        moved += change
        assert cost.seconds(64) == pytest.approx(first * exp(moved))
    assert cost.seconds(1) == pytest.approx(1e-3 * exp(0.04))


def test_the_scale_follows_at_known_knots_only() -> None:
    cost = StepCost()
    cost.record(1, 1e-3)
    cost.record(1, 1e-3 * exp(0.03))  # a third of a fifth of it; and the shape 1 / 2.5
    assert cost.seconds(1) == pytest.approx(1e-3 * exp(0.03 / 15 + 0.03 / 2.5))
    assert cost.seconds(8) / cost.seconds(1) == pytest.approx(1.8 / 1.1)
