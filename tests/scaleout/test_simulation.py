"""Targets of the router on the five short traces of `benchmarks/routing`: real engines, simulated
time.

Time depends on the seed alone, so the results are equal on all machines.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROUTING = Path(__file__).parents[2] / "benchmarks/routing"
TRACES = ("one hot prefix", "many tenants", "chats", "no sharing", "bursts")
POLICIES = ("headrace", "power of two", "round robin")


def run(folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Run the benchmark; return its rows and its output."""
    file = folder / "rows.jsonl"
    command = [sys.executable, str(ROUTING), "--quick", "--json", str(file), *words]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "NO_COLOR": "1",
    }
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in file.read_text().splitlines()], result.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    return run(tmp_path_factory.mktemp("routing"))


def test_router_reaches_its_targets(ran: tuple[list[dict[str, Any]], str]) -> None:
    rows, text = ran
    runs = {(row["trace"], row["policy"]): row for row in rows if "trace" in row}
    assert list(runs) == list(product(TRACES, POLICIES))
    for trace in TRACES:
        own, two = runs[trace, "headrace"], runs[trace, "power of two"]
        assert own["requests"] == two["requests"] >= 4 * 36
        assert own["skew"] <= 1.3
        assert own["p50"] <= own["p99"] <= two["p99"]
        assert own["missed"] == [] and f"{1e3 * own['p99']:.0f}" in text
    for trace in ("one hot prefix", "chats", "bursts"):
        assert 0.9 <= runs[trace, "headrace"]["of_infinite_recurring"] <= 1
    for trace in (
        "many tenants",
        "chats",
    ):  # traces with prefixes that other policies spread over all replicas
        assert runs[trace, "headrace"]["hit_rate"] > 1.15 * runs[trace, "power of two"]["hit_rate"]
    assert all(runs["no sharing", policy]["hit_rate"] == 0 for policy in POLICIES)


def test_decisions_are_timed(ran: tuple[list[dict[str, Any]], str]) -> None:
    timed = [row for row in ran[0] if "prompt_len" in row]
    assert [(row["replicas"], row["prompt_len"]) for row in timed] == [
        (50, 512),
        (50, 2048),
        (50, 8192),
    ]
    assert all(0 < row["median"] <= row["p99"] <= row["slowest"] for row in timed)


def test_equal_seeds_give_equal_results(
    ran: tuple[list[dict[str, Any]], str], tmp_path: Path
) -> None:
    again, _ = run(tmp_path, "--trace", "chats", "--no-decisions")
    other, _ = run(tmp_path, "--trace", "chats", "--no-decisions", "--seed", "1")
    assert again == [row for row in ran[0] if row.get("trace") == "chats"]
    assert [row["p99"] for row in other] != [row["p99"] for row in again]
