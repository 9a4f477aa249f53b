"""Speed of replicas, learnt from the reports of single steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.remote import frames
from headrace.scaleout.replica_speed import SpeedEstimator


def step_report(number: int, rows: float, seconds: float) -> frames.Report:
    figures = {"steps": float(number), "rows_last": rows, "step_seconds": seconds}
    return frames.Report(figures, {}, {})


def learnt(steps: list[tuple[float, float]]) -> SpeedEstimator:
    """An estimator that has observed steps of some rows and seconds."""
    estimator = SpeedEstimator()
    for number, (rows, seconds) in enumerate(steps, 1):
        estimator.observe(step_report(number, rows, seconds))
    return estimator


def test_default_before_the_first_step() -> None:
    speed = SpeedEstimator().estimate(7, SpeedEstimator())
    assert speed.step_seconds > 0 and speed.row_seconds > 0 and speed.max_num_seqs == 7
    empty_steps = learnt([(0, 0.1), (5, 0)])
    assert empty_steps.estimate(7, SpeedEstimator()) == speed


def test_steps_on_a_line_give_that_line() -> None:
    steps = [(rows, 0.01 + 0.0005 * rows) for rows in (1, 4, 200, 2, 30, 1)]
    speed = learnt(steps).estimate(8, SpeedEstimator())
    assert speed.step_seconds == pytest.approx(0.01)
    assert speed.row_seconds == speed.sequence_seconds == pytest.approx(0.0005)


def test_old_steps_are_forgotten() -> None:
    old = [(rows, 0.01 + 0.0005 * rows) for rows in (1, 4, 200)]
    new = [(rows, 0.02 + 0.001 * rows) for rows in (1, 4, 200)] * 60
    speed = learnt(old + new).estimate(8, SpeedEstimator())
    assert speed.step_seconds == pytest.approx(0.02, rel=0.01)


def test_repeated_report_has_no_effect() -> None:
    estimator = learnt([(1, 0.01), (9, 0.02)])
    before = estimator.estimate(8, SpeedEstimator())
    estimator.observe(step_report(2, 9.0, 5.0))
    assert estimator.estimate(8, SpeedEstimator()) == before


@given(
    st.lists(
        st.tuples(st.integers(1, 5000).map(float), st.floats(1e-6, 100)), min_size=1, max_size=50
    )
)
def test_estimates_are_positive(steps: list[tuple[float, float]]) -> None:
    speed = learnt(steps).estimate(8, SpeedEstimator())
    assert speed.step_seconds > 0 and speed.row_seconds > 0


def test_few_steps_are_combined_with_the_steps_of_all_replicas() -> None:
    common = learnt([(rows, 0.01 + 0.0005 * rows) for rows in (1, 4, 200)] * 9)
    assert SpeedEstimator().estimate(8, common) == common.estimate(8, SpeedEstimator())
    slow = learnt([(2, 0.05)])
    fast_step = common.estimate(8, SpeedEstimator()).step_seconds
    assert fast_step < slow.estimate(8, common).step_seconds < 0.02
