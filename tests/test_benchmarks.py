"""The micro benchmarks run, print their rows and write JSON that says the same; what they measure
is not looked at.
"""

import json
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.backend.stored import random_stored

ROOT = Path(__file__).parents[1]
MICRO = ROOT / "benchmarks/micro"

FORMATS = ("Q4_0", "Q4_1", "Q8_0", "I8_ROW", "Q4_K", "Q6_K", "BF16")
GEMV = (
    *("Q4_0", "Q4_1", "Q8_0", "I8_ROW", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16"),
    *("int2-g128", "int3-g128", "int4-g128", "int8-g128", "nf4-g64", "iq4_nl"),
)
ROWS = {  # program: the keys that tell its rows apart, and their values in order
    "roof": (
        ("what",),
        [("memory read",), *((f"{kind} multiply-adds",) for kind in ("int8", "bf16", "f32"))]
        + [(f"barrier, {items}",) for items in ("no item", "1 item", "an item a thread")],
    ),
    "gemv": (("format", "rows"), list(product(GEMV, (1, 2, 3, 4, 5, 6, 8, 12, 16)))),
    "gemm": (("format", "rows"), list(product(FORMATS, (16, 32)))),
    "experts": (("rows",), [(1,), (2,), (4,), (8,), (16,), (32,)]),
    "norm": (("width", "rows"), [(64, 1), (64, 16), (64, 512)]),
    "attention": (
        ("step", "context", "batch", "rows"),
        [("decode", 64, 1, None), ("decode", 64, 2, None), ("prefill", None, None, 64)],
    ),
    "head": (
        ("program", "format"),
        [("head", "Q4_1"), ("head", "Q6_K"), ("head", "Q8_0"), *[("sampling", None)] * 4],
    ),
    "plan": (
        ("program", "seqs"),
        [("plan", 1), ("plan", 4), ("plan", 16), ("build", 1), ("build", 16)],
    ),
}


@pytest.mark.parametrize("program", ROWS)
def test_program(program: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        str(MICRO / f"{program}.py"),
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
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    machine, *rows = map(json.loads, file.read_text().splitlines())
    assert (machine["threads"], machine["quick"]) == (1, True)
    keys, expected = ROWS[program]
    assert [tuple(row.get(key) for key in keys) for row in rows] == expected
    tables = [table.splitlines() for table in result.stdout.split("\n\n")[1:]]
    assert sum(len(table) - 2 for table in tables) == len(
        rows
    )  # a title, headings, and a line for each row
    for figure in (value for row in rows for value in row.values() if isinstance(value, dict)):
        assert (
            figure["low"] <= figure["median"] <= figure["high"]
            and math.isfinite(figure["high"])
            and figure["rounds"] == 2
        )


def test_every_program_is_here_and_in_the_whole() -> None:
    helpers = {"__main__", "harness", "native"}
    assert {file.stem for file in MICRO.glob("*.py")} - helpers >= set(ROWS)
    whole = (MICRO / "__main__.py").read_text()
    assert all(f"from {program} import" in whole for program in ROWS)


def test_every_scenario_of_the_soak_is_in_the_whole() -> None:
    folder = ROOT / "benchmarks/soak"
    result = subprocess.run(
        [sys.executable, folder, "--help"], capture_output=True, text=True, timeout=60
    )
    assert not result.returncode, result.stderr
    named = re.findall(
        r"\w+", result.stdout.partition("positional arguments:\n")[2].partition("options:")[0]
    )
    assert {file.stem for file in folder.glob("*.py")} - {"__main__", "harness", "client"} == set(
        named
    ) - {"SCENARIO", "scenarios"}


@pytest.mark.parametrize(
    ("program", "line"),
    [("first_answers", r"run +quote +[\d.]+ "), ("acceptance", r"\n +\d+ +\d+ +[\d.]+\n")],
)
def test_benchmarks_of_drafts_run(program: str, line: str) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / f"benchmarks/{program}.py", "--quick"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not result.returncode, result.stderr
    assert re.search(line, result.stdout)


def test_disturbed_rounds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MICRO))
    harness: Any = import_module("harness")
    rounds = harness.Rounds({}, 0, 0)
    values = [(1.0, True), (90.0, False), (2.0, True), (4.0, True)]
    rounds.samples = {
        "kernel": [harness.Sample(*v) for v in values],
        "roof": [harness.Sample(2.0, True)] * 4,
    }
    ratio = rounds.spread(lambda kernel, roof: kernel / roof, "kernel", "roof")
    assert ratio == (1.0, 0.5, 2.0, 3, True)
    rounds.samples["roof"][0] = harness.Sample(2.0, False)
    ratio = rounds.spread(lambda kernel, roof: kernel / roof, "kernel", "roof")
    assert ratio == (1.5, 0.5, 45.0, 4, False)
    assert ratio.text(".1f") == "~1.5 (0.5-45.0)"


def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MICRO))
    native: Any = import_module("native")
    stored = random_stored("Q4_0", 32, 64, seed=0)
    linear = native.LinearPlan(stored, threads=1, min_bytes=1, max_rows=2)
    assert 0 < linear.error < 0.02
    linear.stored = random_stored("Q4_0", 32, 64, seed=1)
    with pytest.raises(SystemExit, match="Q4_0 32 x 64 is wrong"):
        linear.refuse_wrong_results()
