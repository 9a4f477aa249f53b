"""The build refuses instruction sets that it does not know; tests of other builds exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arm import __main__ as arm_tests
from tests.native import sanitize

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_an_unknown_instruction_set_is_refused_by_name(tmp_path: Path) -> None:
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DHEADRACE_ISAS=portable;AVX2"]
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), *options]
    result = subprocess.run(command, capture_output=True, text=True)
    said = re.sub(r"\s+", " ", result.stderr)
    assert result.returncode and "HEADRACE_ISAS has 'portable', which is no instruction set" in said
    assert "choose native, all, or a list" in said


@pytest.mark.parametrize("target", ["test-arm", "sanitize"])
def test_files_of_other_builds_exist(target: str) -> None:
    paths = {
        "test-arm": (*arm_tests.TESTS, *arm_tests.LEFT_OUT),
        "sanitize": (*sanitize.SHORT, *sanitize.WHOLE, sanitize.LEFT_OUT),
    }
    assert all((ROOT / path).exists() for path in paths[target])
