"""What steps take, from reports of single ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.remote import frames
from headrace.scaleout.step_times import StepTimes


def learnt(steps: list[tuple[float, float]]) -> StepTimes:
    """From steps of so many rows and seconds."""
    times = StepTimes()
    for number, (rows, seconds) in enumerate(steps, 1):
        times.observe(
            frames.Report(
                {"steps": float(number), "rows_last": rows, "step_seconds": seconds}, {}, {}
            )
        )
    return times


def test_before_there_was_a_step() -> None:
    cost = StepTimes().cost(7, StepTimes())
    assert cost.step_seconds > 0 and cost.row_seconds > 0 and cost.max_num_seqs == 7
    assert learnt([(0, 0.1), (5, 0)]).cost(7, StepTimes()) == cost, "no step at all"


def test_a_line() -> None:
    cost = learnt([(rows, 0.01 + 0.0005 * rows) for rows in (1, 4, 200, 2, 30, 1)]).cost(
        8, StepTimes()
    )
    assert cost.step_seconds == pytest.approx(
        0.01
    ) and cost.row_seconds == cost.sequence_seconds == pytest.approx(0.0005)


def test_it_forgets() -> None:
    steps = [(rows, 0.01 + 0.0005 * rows) for rows in (1, 4, 200)] + [
        (rows, 0.02 + 0.001 * rows) for rows in (1, 4, 200)
    ] * 60
    assert learnt(steps).cost(8, StepTimes()).step_seconds == pytest.approx(0.02, rel=0.01)


def test_a_report_that_was_heard_already() -> None:
    times = learnt([(1, 0.01), (9, 0.02)])
    before = times.cost(8, StepTimes())
    times.observe(frames.Report({"steps": 2.0, "rows_last": 9.0, "step_seconds": 5.0}, {}, {}))
    assert times.cost(8, StepTimes()) == before


@given(
    st.lists(
        st.tuples(st.integers(1, 5000).map(float), st.floats(1e-6, 100)), min_size=1, max_size=50
    )
)
def test_whatever_steps_there_were(steps: list[tuple[float, float]]) -> None:
    """Nothing is free, and nothing takes less than no time."""
    cost = learnt(steps).cost(8, StepTimes())
    assert cost.step_seconds > 0 and cost.row_seconds > 0


def test_few_steps_count_with_those_of_all() -> None:
    common = learnt([(rows, 0.01 + 0.0005 * rows) for rows in (1, 4, 200)] * 9)
    assert StepTimes().cost(8, common) == common.cost(8, StepTimes())
    slow = learnt([(2, 0.05)])
    assert common.cost(8, StepTimes()).step_seconds < slow.cost(8, common).step_seconds < 0.02
