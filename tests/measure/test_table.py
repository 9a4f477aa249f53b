import json

import pytest

from headrace.measure import table


def test_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_table(["name", ">size"], [["a", "10 B"], ["long one", "1 B"]], "Title")
    assert capsys.readouterr().out == "Title\nname      size\na         10 B\nlong one   1 B\n"


def test_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_table(["name", ">size"], [])
    assert capsys.readouterr().out == "name  size\n"


def test_figures_have_no_heading(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_figures("Title", {"a": "1", "bb": "2"})
    assert capsys.readouterr().out == "Title\na   1\nbb  2\n\n"


def test_a_name_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_figures("\x1b[2J", {"a": "\x1b]0;title\x07\nnext line"})
    assert capsys.readouterr().out == "\ufffd[2J\na  \ufffd]0;title\ufffd\ufffdnext line\n\n"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_json({"a": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_100_000, "98.1 MB"),
        (2**31, "2.1 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_size(num_bytes: float, text: str) -> None:
    assert table.size(num_bytes) == text
