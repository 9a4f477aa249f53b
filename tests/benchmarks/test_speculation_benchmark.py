"""`benchmarks/speculation.py` runs, and its texts have the stated properties."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_speculation_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    command = [
        sys.executable,
        str(BENCHMARKS / "speculation.py"),
        "--quick",
        "--workloads",
        "copy,chat",
        "--json",
        str(file),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [*command, "--methods", "suffix,auto"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    keys = [(line["workload"], line["batch"], line["method"]) for line in lines]
    assert keys == [
        (w, b, m) for w in ("copy", "chat") for b in (1, 2) for m in ("off", "suffix", "auto")
    ]
    assert len(result.stdout.splitlines()) == 1 + len(lines)
    for line in lines:
        assert (
            line["ratio"]["low"] <= line["ratio"]["median"] <= line["ratio"]["high"]
            and line["ratio"]["rounds"] == 1
        )
        assert line["tokens_per_step"] >= 1 and 0 <= line["acceptance"] <= 1
        assert line["method"] != "off" or (line["ratio"]["median"], line["proposed_per_token"]) == (
            1,
            0,
        )


def test_speculation_benchmark_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    texts: Any = import_module("speculation_texts")
    for workload in texts.WORKLOADS:
        some = texts.prompts(workload, 0, 100)
        assert some[40:60] == texts.prompts(workload, 40, 20)
        # An agent repeats few calls.
        assert len(set(some)) > (20 if workload == "agent" else 60), workload
