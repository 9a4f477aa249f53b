"""`headrace bench` on a tiny model: its rows, its tables, and its errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli import bench as command
from headrace.cli import main as cli
from headrace.planner.hardware import Machine
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

LATENCY = ("--pp", "16,40", "--tg", "8", "--depth", "0,33", "--repetitions", "3", "--threads", "1")
THROUGHPUT = (
    "--concurrency",
    "1,3",
    "--prompt-tokens",
    "20",
    "--output-tokens",
    "6",
    "--threads",
    "1",
)
MACHINE = Machine("a processor", "an isa", 1, 1e9, {"int8": 1e12, "bf16": 1e12, "f32": 1e12})


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of known speed: measuring this one takes half a second each time."""
    monkeypatch.setattr("headrace.planner.hardware.measure", lambda threads, backend="cpu": MACHINE)


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    """A model of 264 tokens, with a context of 256."""
    path: Path = write_gguf()
    return str(path)


@pytest.fixture
def lines(model: str, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(kind: str, *flags: str) -> list[dict[str, Any]]:
        assert cli.main(["bench", kind, model, *flags, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


class TestBenchJson:
    def test_bench_json_line_is_complete(self, lines: Any, model: str) -> None:
        for row in (*lines("latency", *LATENCY), *lines("throughput", *THROUGHPUT)):
            assert row["model"] == model and row["file_bytes"] == Path(model).stat().st_size
            assert row["cpu"] == "a processor" and row["threads"] == 1 and row["kv_dtype"] == "bf16"
            assert row["version"] and row["date"] and row["peak_memory"] > 0
            assert row["share_of_limit"] == pytest.approx(row["tokens_per_second"] / row["limit"])

    def test_latency(self, lines: Any) -> None:
        rows = lines("latency", *LATENCY)
        assert [(row["test"], row["depth"]) for row in rows] == [
            (t, d) for d in (0, 33) for t in ("pp16", "pp40", "tg8")
        ]
        for row in rows:
            tokens, seconds = int(row["test"][2:]), row["samples"]["seconds"]
            assert len(seconds) == len(row["samples"]["first_token"]) == 3 and min(seconds) > 0
            assert (
                row["tokens_per_second"]
                == pytest.approx(tokens / np.median(seconds))
                == pytest.approx(1000 / row["ms_per_token"])
            )
            assert row["tokens_per_second_min"] == pytest.approx(tokens / max(seconds))
            assert row["tokens_per_second_max"] == pytest.approx(tokens / min(seconds))
            assert row["first_token"] == np.median(row["samples"]["first_token"])
            if row["test"].startswith(
                "pp"
            ):  # the first token follows the whole prompt, of which these are the last tokens
                whole = zip(seconds, row["samples"]["first_token"], strict=True)
                assert all(part < first if row["depth"] else part == first for part, first in whole)

    def test_throughput(self, lines: Any) -> None:
        rows = lines("throughput", *THROUGHPUT)
        assert [row["concurrency"] for row in rows] == [1, 3]
        for row in rows:
            count, samples = row["concurrency"], row["samples"]
            assert row["tokens_per_second"] == pytest.approx(count * 6 / samples["seconds"])
            assert (
                len(samples["first_token"]) == count and len(samples["between_tokens"]) == count * 5
            )
            assert row["first_token"] <= row["first_token_p95"] <= samples["seconds"]
            assert row["between_tokens"] <= row["between_tokens_p95"] <= samples["seconds"]

    def test_one_output_token_has_no_time_between_tokens(self, lines: Any) -> None:
        (row,) = lines(
            "throughput", "--concurrency", "2", "--prompt-tokens", "4", "--output-tokens", "1"
        )
        assert row["between_tokens"] is None and row["samples"]["between_tokens"] == []

    def test_options_reach_the_engine(self, lines: Any) -> None:
        (row,) = lines(
            "latency",
            "--pp",
            "8",
            "--tg",
            "0",
            "--depth",
            "0",
            "--repetitions",
            "1",
            "--kv-dtype",
            "f32",
        )
        assert row["kv_dtype"] == "f32"


class TestBenchTable:
    def test_latency(self, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "latency", model, *LATENCY]) == 0
        text = capsys.readouterr().out
        (heading,) = (line for line in text.splitlines() if line.startswith("test"))
        assert heading.split("  ")[0] == "test"
        assert all(
            word in heading
            for word in ("tokens/s", "min-max", "ms/token", "first token", "limit", "of limit")
        )
        assert [
            line.split("  ")[0] for line in text.splitlines() if line.startswith(("pp", "tg"))
        ] == 3 * [*("pp16", "pp40", "tg8", "pp16 @ d33", "pp40 @ d33", "tg8 @ d33")]
        assert "MBU, measured" in text and "detokenise" in text and "$" not in text
        assert "a processor" in text and "Peak memory" in text and "3 runs" in text

    def test_throughput(
        self, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        file = tmp_path / "rows.jsonl"
        for times in (1, 2):
            flags = (*THROUGHPUT, "--price", "2.5", "--output", str(file))
            assert cli.main(["bench", "throughput", model, *flags]) == 0
            text = capsys.readouterr().out
            assert "$ a million in" in text
            assert "1 x (20 + 6)" in text and "3 x (20 + 6)" in text and "between tokens" in text
            assert [json.loads(line)["concurrency"] for line in file.read_text().splitlines()] == [
                1,
                3,
            ] * times


class TestBenchErrors:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("speed",), "argument KIND: invalid choice: 'speed'"),
            (("latency", "--pp", "x"), "--pp: 'x' is not a list of whole numbers"),
            (("latency", "--depth=-1"), "--depth: '-1' is not"),
            (("latency", "--depth", "1,,2"), "--depth: '1,,2' is not"),
            (
                ("latency", "--repetitions", "0"),
                "--repetitions: '0' is not a whole number from 1",
            ),
            (("latency", "--pp", "0", "--tg", "0"), "set at least one above 0"),
            (("latency", "--concurrency", "2"), "--concurrency is for `headrace bench throughput`"),
            (("throughput", "--pp", "2"), "--pp is for `headrace bench latency`"),
            (("throughput", "--concurrency", "0,1"), "--concurrency: '0,1' is not"),
            (("throughput", "--threads", "-1"), "threads must be"),
            (
                ("latency", "--output", "/no/such/folder/rows"),
                "--output /no/such/folder/rows: the file cannot be written",
            ),
        ],
    )
    def test_bench_error_is_one_line(
        self, model: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
    ) -> None:
        code = cli.main(["bench", words[0], model, *words[1:]])
        shown = capsys.readouterr()
        assert code == 2 and not shown.out
        assert message in shown.err and len(shown.err.splitlines()) == 1

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ("latency", "--pp", "200", "--tg", "8", "--depth", "0,100"),
                "a context of 301 tokens, and the model's ends at 256; shorten",
            ),
            (("latency", "--pp", "0", "--tg", "255", "--depth", "0"), "a context of 257 tokens"),
            (
                ("throughput", "--output-tokens", "129"),
                "a context of 257 tokens, and the model's ends at 256; shorten",
            ),
        ],
    )
    def test_bench_beyond_the_context(
        self, model: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
    ) -> None:
        assert cli.main(["bench", words[0], model, *words[1:]]) == 2
        shown = capsys.readouterr()
        assert not shown.out and message in shown.err and len(shown.err.splitlines()) == 1

    def test_bench_of_the_whole_context(self, lines: Any) -> None:
        (row,) = lines("latency", "--pp", "0", "--tg", "254", "--depth", "0", "--repetitions", "1")
        assert row["test"] == "tg254"

    def test_bench_finds_the_model_before_it_measures(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(
            "headrace.planner.hardware.measure",
            lambda threads, backend="cpu": pytest.fail("measured"),
        )
        assert cli.main(["bench", "latency", "no-such-model"]) == 3
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_bench_settings_have_options() -> None:
    parser = cli.Parser("headrace bench")
    command.configure(parser)
    flags = {
        name.removeprefix("--").replace("-", "_")
        for name in parser._option_string_actions
        if name.startswith("--")
    }
    assert {name for settings in command.SETTINGS.values() for name in settings} <= flags
