"""The account of a proposer: it loses no more than its allowance, and recovers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculation.account import START_SECONDS, TIME_SHARE, Account

TOKEN = 0.004
LIMIT = TOKEN * 17
SECONDS = st.floats(0, 0.05)


def account(start: float = 0.0) -> Account:
    made = Account(start)
    made.set_limit(TOKEN, 1)
    return made


def test_an_account_starts_with_its_limit_or_more() -> None:
    assert account().credit == pytest.approx(LIMIT)
    assert account(2 * LIMIT).credit == 2 * LIMIT
    later = account(2 * LIMIT)
    later.book(-0.01)
    later.set_limit(3 * TOKEN, 1)
    assert later.credit == pytest.approx(2 * LIMIT - 0.01)


def test_savings_fill_an_account_up_to_its_limit() -> None:
    made = account()
    made.book(-0.02)
    made.book(0.01)
    assert made.credit == pytest.approx(LIMIT - 0.01)
    made.book(5.0)
    assert made.credit == pytest.approx(LIMIT)


def test_time_pays_a_debt() -> None:
    made = account()
    made.book(-LIMIT - 0.003)
    assert made.wait() == pytest.approx(0.003 / TIME_SHARE)
    made.pass_time(made.wait() * 0.999)
    assert made.wait() > 0
    made.pass_time(made.wait() * 1.001)
    assert made.wait() == 0 and made.wait(0.001) == pytest.approx(0.001 / TIME_SHARE, rel=0.01)


def test_a_first_call_leaves_a_reserve_for_drafts() -> None:
    made = account()
    made.book(-0.6 * LIMIT)
    assert made.wait(0.1 * LIMIT) == 0 and made.wait(0.1 * LIMIT, has_reserve=True) > 0
    made.book(0.3 * LIMIT)
    assert made.wait(0.1 * LIMIT, has_reserve=True) == 0


def test_a_full_account_affords_any_call_once() -> None:
    made = account()
    assert made.wait(10.0) == 0
    made.book(-10.0)
    assert made.wait(0.001) == pytest.approx((10.001 - LIMIT) / TIME_SHARE)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=300))
def test_no_more_than_the_allowance_is_lost(steps: list[tuple[float, float, float, float]]) -> None:
    """Whatever calls cost and save, and whatever they were expected to cost.

    A step takes some time, a call is expected to take some, and takes and saves other times. The
    loss is counted from any earlier moment on.
    """
    made = account(START_SECONDS)
    elapsed, gained, highest, largest = 0.0, 0.0, 0.0, 0.0
    for seconds, expected, cost, saved in steps:
        made.pass_time(seconds)
        elapsed += seconds
        if not made.wait(expected):
            made.book(-cost)
            made.book(saved)
            gained += saved - cost
            largest = max(largest, cost)
        highest = max(highest, gained + TIME_SHARE * elapsed)
        lost = highest - gained - TIME_SHARE * elapsed
        assert lost <= max(START_SECONDS, LIMIT) + largest + 1e-9


@given(st.integers(10, 200), st.floats(0.0005, 0.004))
def test_drafts_that_begin_to_pay_go_on(num_wrong: int, cost: float) -> None:
    """After wrong drafts, a probe is affordable now and then. If it pays, the next one is, too."""
    made = account()
    for _ in range(num_wrong):
        made.pass_time(TOKEN)
        if not made.wait(cost):
            made.book(-cost)
    waited = 0
    while made.wait(cost):
        made.pass_time(TOKEN)
        waited += 1
    assert waited * TOKEN <= cost / TIME_SHARE + TOKEN
    for _ in range(50):  # each call saves more than it costs
        assert not made.wait()
        made.book(-cost)
        made.book(1.5 * cost)
        made.pass_time(TOKEN)
