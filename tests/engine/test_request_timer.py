"""The time of a request, and its parts."""

from dataclasses import astuple
from itertools import count
from typing import Any

import pytest

from headrace.engine.request_timer import RequestTimer, WorkTimer
from headrace.outputs import Timing
from headrace.sampling_params import SamplingParams
from tests.engine.toy import toy_engine


class Clock:
    """Returns seconds that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class TestRequestTimer:
    def test_timing_splits_the_time_of_a_request(self) -> None:
        clock = Clock()
        detokeniser = WorkTimer(clock)
        with detokeniser:  # of other requests
            clock.seconds = 200
        timer = RequestTimer(clock, detokeniser)
        clock.seconds = 201
        assert timer.timing() == Timing(1, 0, 0, 0)
        assert timer.start()
        clock.seconds = 203
        assert timer.timing() == Timing(1, 2, 0, 0)
        with detokeniser:
            clock.seconds = 203.25
            timer.token()
            clock.seconds = 203.5
            assert timer.timing() == Timing(1, 2, 0, 0.5)
            clock.seconds = 204
        clock.seconds = 207
        assert timer.timing() == Timing(1, 2, 3, 1)

    def test_only_the_first_admission_and_the_first_token_count(self) -> None:
        clock = Clock()
        timer = RequestTimer(clock, WorkTimer(clock))
        for first in (True, False, False):
            clock.seconds += 1
            assert timer.start() is first
        for _ in range(3):
            clock.seconds += 1
            timer.token()
        clock.seconds += 1
        assert timer.timing() == Timing(1, 3, 3, 0)


PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CASES = {
    "waits": {"max_num_seqs": 1},
    "preemption": {"num_blocks": 9},
    "overlapping steps": {"late": True},
    "several steps at once": {"multi_step_ms": 1000},
    "static batches": {"batching": "static"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_parts_of_timing_sum_to_the_time_of_the_request(options: dict[str, Any]) -> None:
    ticks = count()  # each reading of the clock takes a second
    engine = toy_engine(clock=lambda: float(next(ticks)), **options)
    added, prompts = {}, [[1, 2, 3], [4, 5], [6] * 12, [7]]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=1, seed=1, n=3, max_tokens=8, ignore_eos=True)
        request_id = engine.add_request(prompt, params if number == 1 else PARAMS)
        added[request_id] = engine._requests[request_id].timer.added

    for _ in range(3):
        engine.step()
    begun = next(ticks)
    aborted = engine.abort("3")
    assert aborted
    assert begun < added["3"] + sum(astuple(aborted.timing)) < next(ticks)

    ended = 0
    while engine.has_work:
        begun = next(ticks)
        for result in [update.result for update in engine.step() if update.result]:
            ended += 1
            timing = result.timing
            assert begun < added[result.request_id] + sum(astuple(timing)) < next(ticks)
            assert min(astuple(timing)) > 0
    assert ended == 3
    if "num_blocks" in options:
        assert engine.stats().preemptions
