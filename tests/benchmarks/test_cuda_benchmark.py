"""The programs of `benchmarks/cuda` in Triton's interpreter: their checks hold; their speeds are
meaningless.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CUDA = Path(__file__).parents[2] / "benchmarks/cuda"


def run(program: Path, out: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The written rows and the printed text of a program."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "NO_COLOR": "1"}
    command = [sys.executable, str(program), "--smoke", "--out", str(out), *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert not result.returncode, result.stdout[-2000:] + result.stderr[-2000:]
    return json.loads(out.read_text()), result.stdout


def test_cuda_figures(tmp_path: Path) -> None:
    report, printed = run(CUDA, tmp_path / "figures.json", "--formats", "bf16", "int4")
    figures = report["figures"]
    names = [figure["name"] for figure in figures]
    kinds = [
        "share of copy bandwidth",
        "step of one row",
        "prefill",
        "over cuBLAS",
        "work of the host",
        "sequences",
        "KV in bf16",
        "copy",
    ]
    assert not [kind for kind in kinds if not any(kind in name for name in names)]
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in figures)
    assert all((figure["floor"] is None) == (figure["is_reached"] is None) for figure in figures)
    table = printed.split("\n\n")[-1].splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == names


def test_cuda_tiles(tmp_path: Path) -> None:
    report, printed = run(CUDA / "tiles.py", tmp_path / "tiles.json")
    assert [one["format"] for one in report["products"]] == ["bf16", "int8", "int4"]
    assert len(printed.splitlines()) == 3


def test_cuda_checks(tmp_path: Path) -> None:
    report, printed = run(CUDA / "checks.py", tmp_path / "checks.json")
    assert len(report["checks"]) > 30 and all(check["holds"] for check in report["checks"])
    assert printed.splitlines()[-1] == f"{len(report['checks'])} of {len(report['checks'])} hold"
