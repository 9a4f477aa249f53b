"""The serving benchmarks print their rows and write them as JSON; speeds are not checked."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.backend_traits import traits_of

SERVING = Path(__file__).parents[2] / "benchmarks/serving"
Rows = list[dict[str, Any]]
TokenRun = Callable[..., tuple[Rows, str]]


@pytest.fixture
def run(tmp_path: Path) -> TokenRun:
    """The rows of a program, and its printed text."""

    def run(*words: str) -> tuple[Rows, str]:
        file = tmp_path / "rows.jsonl"
        command = [
            sys.executable,
            str(SERVING),
            *words,
            "--quick",
            "--threads",
            "1",
            "--json",
            str(file),
        ]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "NO_COLOR": "1",
        }
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
        )
        assert result.returncode == 0, result.stderr
        machine, *rows = map(json.loads, file.read_text().splitlines())
        assert (machine["threads"], machine["quick"]) == (1, True)
        return rows, result.stdout

    return run


def test_serving_waste(run: TokenRun) -> None:
    rows, text = run("waste")
    found = {(row["batching"], row["block_size"]): row["fragmentation"] for row in rows}
    assert list(found) == [("inflight", 16), ("inflight", 32), ("static", 32)]
    assert 0 < found["inflight", 16] < 0.04  # follows from the lengths and blocks of 16
    assert found["inflight", 16] < found["inflight", 32] < 0.1 < found["static", 32]
    for row in rows:
        assert row["waste"] >= row["fragmentation"] and f"{100 * row['waste']:.1f} %" in text


def test_serving_batching(run: TokenRun) -> None:
    inflight, static, ratio = run("batching")[0]
    assert (inflight["batching"], static["batching"]) == ("inflight", "static")
    assert ratio["ratio"] == pytest.approx(
        [inflight["tokens_per_second"][0] / static["tokens_per_second"][0]]
    )
    assert inflight["waste"][0] < static["waste"][0]


def test_serving_pauses(run: TokenRun) -> None:
    rows, text = run(
        "pauses",
        "--set",
        "max_num_batched_tokens=64",
        "--set",
        "max_num_batched_tokens=32,proposer=suffix",
    )
    assert [row["config"] for row in rows] == [
        "max_num_batched_tokens=64",
        "max_num_batched_tokens=32, proposer=suffix",
    ]
    for row in rows:
        assert (
            row["config"] in text
            and row["during_p50"][0] <= row["during_p99"][0] <= row["first_token"][0]
        )
        assert row["ratio"] == [row["during_p99"][0] / row["quiet_p99"][0]]


def test_serving_priority(run: TokenRun) -> None:
    plain, preempting, _ = run("priority")[0]
    assert 1 <= preempting["steps"][0] < plain["steps"][0]


def test_serving_memory(run: TokenRun) -> None:
    for row in run("memory")[0]:
        assert row["used"] <= row["predicted"] <= row["mapped"] < row["predicted"] + (2 << 20)
        assert 0 < row["resident"] <= row["mapped"]


def test_serving_kv_formats(run: TokenRun) -> None:
    truth, *rows = run("kv_formats")[0]
    assert {row["kv_dtype"] for row in rows} == set(traits_of("cpu").kv_dtypes) and truth["kl"] == 0
    for row in rows:
        assert 0 < row["kl"] < 0.1 and abs(row["nll"] / truth["nll"] - 1) < 0.05


def test_serving_windows(run: TokenRun) -> None:
    everything, sinks, last = run("windows")[0]
    assert sinks["nll"] < last["nll"] and last["kv_bytes"] < everything["kv_bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("speed",), "there is no speed; there are waste, batching"),
        (
            ("pauses", "--set", "max_num_batched_tokens"),
            "'max_num_batched_tokens' must be FIELD=VALUE",
        ),
        (("pauses", "--set", "max_num_batched_rows=3"), "did you mean max_num_batched_tokens?"),
    ],
)
def test_serving_errors(words: tuple[str, ...], message: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, str(SERVING), *words, "--quick"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode and message in result.stderr
