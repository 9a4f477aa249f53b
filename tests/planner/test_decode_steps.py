"""Decode steps and their minimum time, from made-up results."""

import pytest

from headrace.outputs import CompletionOutput, DraftStats, RequestOutput, Timing
from headrace.planner.decode_steps import decode_seconds, decode_steps
from headrace.planner.roofline import decode_limit, step_seconds
from headrace.program.op import StepSize
from tests.planner.test_roofline import HERE, SMOLLM2, program


def answer(num_in: int, *num_out: int, **drafts: DraftStats) -> RequestOutput:
    outputs = [
        CompletionOutput(i, "", [1] * n, None, None, "stop", None) for i, n in enumerate(num_out)
    ]
    return RequestOutput(
        "0", None, [1] * num_in, None, outputs, True, Timing(0, 1, 1, 0), drafts=drafts
    )


def test_plain_decoding_takes_a_step_for_each_token_after_the_first() -> None:
    assert decode_steps(answer(10, 21), 2) == [(20, StepSize(((20, 1),), 1, 2))]
    assert decode_steps(answer(10, 2), 2) == [(1, StepSize(((11, 1),), 1, 2))]
    for num_out in (0, 1):
        assert decode_steps(answer(10, num_out), 2) == []


def test_plain_decoding_at_its_limit() -> None:
    p = program(SMOLLM2, 0.625)
    seconds = decode_seconds(p, HERE, decode_steps(answer(10, 101), 2))
    assert 100 / seconds == pytest.approx(decode_limit(p, HERE, 60, 2))


def test_drafts_make_fewer_steps_of_more_rows() -> None:
    """40 steps after the first drew 100 tokens: 60 accepted ones, and one each. 20 of them had
    drafts, of 75 rows in all.
    """
    steps = decode_steps(
        answer(8, 101, suffix=DraftStats(12, 45, 40), jacobi=DraftStats(8, 30, 20)), 2
    )
    assert steps == [
        (20, StepSize(((58, 1),), 1, 2)),
        (5, StepSize(((58, 4),), 4, 2)),
        (15, StepSize(((58, 5),), 5, 2)),
    ]
    p = program(SMOLLM2, 0.625)
    assert decode_seconds(p, HERE, steps) == pytest.approx(
        sum(count * step_seconds(p, step, HERE) for count, step in steps)
    )


def test_drafts_of_one_size() -> None:
    assert decode_steps(answer(8, 6, suffix=DraftStats(1, 3, 2)), 2) == [
        (2, StepSize(((11, 1),), 1, 2)),
        (1, StepSize(((11, 4),), 4, 2)),
    ]
    assert decode_steps(answer(8, 11, suffix=DraftStats(2, 8, 6)), 2) == [
        (2, StepSize(((14, 1),), 1, 2)),
        (2, StepSize(((14, 5),), 5, 2)),
    ]


def test_no_more_steps_with_drafts_than_there_were_steps() -> None:
    """The draft of the first token's step is counted in the result, but its step is not among
    these.
    """
    assert decode_steps(answer(8, 7, suffix=DraftStats(3, 6, 4)), 2) == [
        (2, StepSize(((12, 3),), 3, 2))
    ]
    assert decode_steps(answer(8, 5, suffix=DraftStats(1, 4, 4)), 2) == []
    assert (
        decode_steps(answer(8, 5, suffix=DraftStats(2, 9, 6)), 2) == []
    )  # the last of them came after the end


def test_several_responses_share_their_steps() -> None:
    """Responses of unequal length take at least the steps of equal ones."""
    assert (
        decode_steps(answer(10, 21, 21), 2)
        == decode_steps(answer(10, 11, 31), 2)
        == [(20, StepSize(((20, 1),) * 2, 2, 2))]
    )
    drafts = DraftStats(8, 16, 12)
    assert decode_steps(answer(10, 15, 15, suffix=drafts), 2) == [
        (4, StepSize(((18, 1),) * 2, 2, 2)),
        (4, StepSize(((18, 3),) * 2, 6, 2)),
    ]


def test_all_beams_of_a_search_take_part() -> None:
    assert decode_steps(answer(10, 21), 2, beam_width=4) == [(20, StepSize(((20, 1),) * 4, 4, 2))]
