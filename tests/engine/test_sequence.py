"""The engine's records of requests and sequences."""

from headrace.engine.sequence import RequestTimer
from headrace.outputs import Timing


class Clock:
    """Returns seconds that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class TestRequestTimer:
    def test_timing_splits_the_time_of_a_request(self) -> None:
        clock = Clock()
        watch = RequestTimer(clock)
        clock.seconds = 101
        assert watch.timing() == Timing(1, 0, 0)
        assert watch.start()
        clock.seconds = 103
        assert watch.timing() == Timing(1, 2, 0)
        watch.token()
        clock.seconds = 107
        assert watch.timing() == Timing(1, 2, 4)

    def test_only_the_first_admission_and_the_first_token_count(self) -> None:
        clock = Clock()
        watch = RequestTimer(clock)
        for first in (True, False, False):
            clock.seconds += 1
            assert watch.start() is first
        for _ in range(3):
            clock.seconds += 1
            watch.token()
        clock.seconds += 1
        assert watch.timing() == Timing(1, 3, 3)
