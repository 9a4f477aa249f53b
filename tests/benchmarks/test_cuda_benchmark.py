"""The programs of `benchmarks/cuda` in Triton's interpreter: their checks hold; their speeds are
meaningless.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backend.cuda.examples import examples

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "benchmarks/cuda"


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
        "share of copy bandwidth at one row",
        "step of one row",
        "step of 2 rows",
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


def test_cuda_library(tmp_path: Path) -> None:
    """Sums, residuals and gates of the library's calls have the bits of our kernel."""
    report, printed = run(CUDA / "library.py", tmp_path / "library.json", "--rounds", "1")
    assert [one["differing"] for one in report["library"]] == [0, 0, 0]
    assert len(printed.splitlines()) == 3


def test_cuda_checks(tmp_path: Path) -> None:
    report, printed = run(CUDA / "checks.py", tmp_path / "checks.json")
    assert len(report["checks"]) > 30 and all(check["holds"] for check in report["checks"])
    assert printed.splitlines()[-1] == f"{len(report['checks'])} of {len(report['checks'])} hold"


def test_cuda_drafts(tmp_path: Path) -> None:
    """Drafts on the device are those by way of the host, and no token changes."""
    report, printed = run(CUDA / "drafts.py", tmp_path / "drafts.json")
    rows = report["drafts"]
    checks = [row for row in rows if "check" in row]
    assert len(checks) == 3 and all(row["drafted"] for row in checks)
    assert {row["time"] for row in rows if "time" in row} == {"off", "device", "host"}
    assert printed.splitlines()[-1] == f"{len(rows)} of {len(rows)} rows are right"


FAILING = """
import sys
sys.path.insert(0, sys.argv[1])
import checks

made = checks.Product.__init__
def refuse(product, name, *rest):
    if name == "Q4_1":
        raise ValueError("too large")
    made(product, name, *rest)
checks.Product.__init__ = refuse
checked = checks.Product.check
checks.Product.check = lambda product: 1 / 0 if "Q4_0" in product.name else checked(product)
sys.argv = ["checks.py", "--smoke", "--parts", "products", "--out", sys.argv[2]]
checks.main()
"""


def test_a_check_that_raises_has_failed_and_the_others_go_on(tmp_path: Path) -> None:
    out = tmp_path / "checks.json"
    command = [sys.executable, "-c", FAILING, str(CUDA), str(out)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 1, result.stderr[-2000:]
    checks = json.loads(out.read_text())["checks"]
    failed = {check["check"]: check["wrong"] for check in checks if not check["holds"]}
    assert failed == {
        "products: Q4_0, bfloat16": "ZeroDivisionError: division by zero",
        "products: Q4_1, bfloat16": "ValueError: too large",
    }
    assert any("e4m3" in check["check"] for check in checks) and len(checks) > 20


def test_the_page_has_the_figures_of_the_result_files() -> None:
    made = subprocess.run(
        [sys.executable, str(CUDA / "report.py")], capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs/internals/gpu-measured.md").read_text()
    assert page.partition("<!-- figures -->\n")[2].partition("<!-- end of figures -->\n")[0] == made


@pytest.mark.skipif(examples(1) == 1, reason="compiles whole programs: make test-triton")
def test_predictions_of_an_h100(tmp_path: Path) -> None:
    out = tmp_path / "paper.json"
    environment = os.environ | {"TRITON_CACHE_DIR": str(ROOT / "build/triton")}
    command = [sys.executable, str(CUDA / "paper.py"), "--kernels", "--out", str(out)]
    subprocess.run(command, env=environment, check=True)
    shares = {name: value for name, value in json.loads(out.read_text())["paper"].items()}
    assert all(0 < value < 1 for name, value in shares.items() if "share" in name or "KV" in name)
    assert len(shares) == 12
