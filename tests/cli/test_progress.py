"""Progress on a stderr that is no terminal."""

import pytest

from headrace.cli.progress import ProgressLines, progress_bar


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_long_steps_print_an_estimate_and_then_their_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    show = ProgressLines(clock)
    show("reading", 0.0)
    for second in range(1, 101):
        clock.now = float(second)
        show("reading", second / 200)
    show("writing", 0.0)
    clock.now += 1
    show("writing", 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "reading: about 3 minutes in all, by the first 2%",
        "reading: 12%, about 3 minutes left",
        "reading: 22%, about 3 minutes left",
        "reading: 32%, about 2 minutes left",
        "reading: 42%, about 2 minutes left",
    ]


def test_short_steps_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as show:
        for step in ("reading", "writing"):
            for share in (0.0, 0.5, 1.0):
                show(step, share)
    assert capsys.readouterr().err == ""
