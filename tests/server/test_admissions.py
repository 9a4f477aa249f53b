"""Places of requests: the least urgent waiting ones give way."""

from contextlib import ExitStack

import pytest

from headrace.remote import frames
from headrace.remote.errors import NotReadyError
from headrace.remote.stream import Stream
from headrace.server.admissions import Admission, Admissions


@pytest.mark.parametrize(
    ("waiting", "asked", "turned_away"),
    [
        ([(1, 5), (1, 5)], (1, 0), []),
        ([(1, 5), (1, 5), (1, 5)], (1, 0), [2]),
        ([(1, 5), (1, 7), (1, 5)], (1, 0), [1]),
        ([(1, 5), (1, 7), (1, 7)], (2, 0), [1, 2]),
        ([(2, 5), (1, 0)], (1, 4), [0]),
        ([(1, 5), (1, 5), (1, 4)], (2, 4), [0, 1]),
        ([(1, 5), (1, 4), (1, 4)], (2, 4), None),
        ([(1, 4), (1, 4), (1, 4)], (1, 4), None),
        ([(1, 5), (1, 5), (1, 5)], (4, 0), None),
        ([(1, None), (1, 5), (1, None)], (1, 0), [1]),
        ([(1, 5), (1, 5), (1, 5)], (1, None), None),
    ],
)
def test_victims(
    waiting: list[tuple[int, int | None]],
    asked: tuple[int, int | None],
    turned_away: list[int] | None,
) -> None:
    admissions, aborted = Admissions(), list[str]()
    with ExitStack() as stack:
        admitted: list[Admission] = []
        for number, (count, priority) in enumerate(waiting):
            admission = stack.enter_context(admissions.admit(count, priority, 3))
            admission.streams = [Stream(str(number), None, aborted.append)]
            admitted.append(admission)
        before = admissions.num_sequences
        if turned_away is None:
            with pytest.raises(NotReadyError), admissions.admit(*asked, 3):
                pass
            assert admissions.num_sequences == before
            turned_away = []
        else:
            stack.enter_context(admissions.admit(*asked, 3))
            assert admissions.num_sequences <= 3
        assert [i for i, item in enumerate(admitted) if item.was_turned_away] == turned_away
        assert sorted(aborted) == [str(i) for i in turned_away]
        for admission in admitted:
            if admission.was_turned_away:
                with pytest.raises(NotReadyError, match="more urgent"):
                    admission.check()
    assert admissions.num_sequences == 0


def test_request_with_a_token_keeps_its_place() -> None:
    admissions = Admissions()
    with admissions.admit(1, 5, 1) as first:
        first.streams = [Stream("1", None, lambda _: None)]
        output = frames.StepOutput(
            id="1",
            index=0,
            text="a",
            token_ids=[1],
            logprobs=[],
            finish_reason=None,
            stop_reason=None,
        )
        first.streams[0].put(output)
        with pytest.raises(NotReadyError, match="the queue is full"), admissions.admit(1, 0, 1):
            pass
