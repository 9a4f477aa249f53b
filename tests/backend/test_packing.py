"""Weights are packed by a thread, while the caller goes on."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.packing import add_weight
from headrace.checkpoint.files import map_file
from headrace.quant.formats import FORMATS, StoredTensor
from tests.backend.stored import random_stored
from tests.backend.test_cpu_linear import run_rows

UNREADABLE = """
import os
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from headrace.checkpoint.files import map_file
from headrace.config import KvConfig
from headrace.errors import FormatError
from tests.tiny import tiny_executable, tiny_model

path = Path(sys.argv[1])
spec, tensors = tiny_model(0)
names = sys.argv[2:]
path.write_bytes(b"".join(tensors[name].parts["codes"].tobytes() for name in names))
codes, start = np.frombuffer(map_file(path), np.uint8), 0
for name in names:
    size = tensors[name].parts["codes"].size
    parts = {**tensors[name].parts, "codes": codes[start : start + size]}
    tensors = {**tensors, name: replace(tensors[name], parts=parts)}
    start += size
os.truncate(path, 0)
try:
    tiny_executable((spec, tensors), "cpu", KvConfig((1,)), 2).prepare(1, 1)
except FormatError as error:
    print(error)
"""


class Interrupted(Exception):
    pass


def mapped(stored: StoredTensor, path: Path) -> StoredTensor:
    """The same matrix in a file."""
    path.write_bytes(stored.parts["codes"].tobytes())
    codes = np.frombuffer(map_file(path), np.uint8)
    return replace(stored, parts={**stored.parts, "codes": codes})


def rows_of(stored: StoredTensor, starts: bool) -> NDArray[Any]:
    plan = _native.Plan("", 2)
    out = plan.add_buffer(stored.cols, "step", False)
    plan.embed(out, add_weight(plan, stored))
    if starts:
        plan.start_weights()
        assert plan.wait_for_weights() == -1
    run_rows(plan, stored.rows)
    return np.array(plan.floats(out, stored.rows))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "IQ4_XS", "Q6_K", "F16"])
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("permuted", [True, False])
def test_rows_equal_the_stored(name: str, starts: bool, permuted: bool, tmp_path: Path) -> None:
    """From a file as from memory, packed in a thread or by the first run."""
    stored = random_stored(name, 333, 512, 0)
    if permuted:
        stored = replace(stored, row_order=np.random.default_rng(0).permutation(333))
    for tensor in (stored, mapped(stored, tmp_path / "weights")):
        assert tensor.is_mapped == (tensor is not stored)
        np.testing.assert_array_equal(rows_of(tensor, starts), stored.dequantise())


def test_pages_of_the_file_are_given_back(tmp_path: Path) -> None:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("reads the maps of the process as Linux shows them")
    stored = mapped(random_stored("F32", 1024, 1024, 0), tmp_path / "weights")
    assert stored.parts["codes"].sum() > 0  # reads all pages
    plan = _native.Plan("", 2)
    add_weight(plan, stored)
    plan.start_weights()
    assert plan.wait_for_weights() == -1
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.endswith("/weights") for line in lines)
    resident = next(line for line in lines if line.startswith("Rss:"))
    assert int(resident.split()[1]) == 0


@pytest.mark.parametrize(
    "names", [("embed",), ("layers.0.down",), ("layers.0.gate", "layers.0.up")]
)
def test_file_that_was_cut_short_names_its_tensor(names: tuple[str, ...], tmp_path: Path) -> None:
    """One error, and not the signal that reading the page would raise."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", UNREADABLE, str(tmp_path / "weights"), *names]
    child = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert child.returncode == 0, child.stderr
    reason = "its bytes cannot be read; the file was cut short"
    assert any(child.stdout.startswith(f"tensor {name}: {reason}") for name in names)


def test_a_plan_with_unreadable_weights_never_runs(tmp_path: Path) -> None:
    stored = mapped(random_stored("F32", 64, 64, 0), tmp_path / "weights")
    plan = _native.Plan("", 2)
    out = plan.add_buffer(64, "step", False)
    plan.embed(out, add_weight(plan, stored))
    os.truncate(tmp_path / "weights", 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="whose file could not be read"):
            run_rows(plan, 1)


def test_signal_ends_the_wait_and_the_plan_stops_packing() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    rows = np.zeros((2048, 2048), np.float32)
    stored = StoredTensor.from_bytes(
        "w", FORMATS["F32"], rows.shape, rows.view(np.uint8).reshape(-1)
    )
    plan = _native.Plan("", 1)
    for _ in range(100):  # 1.6 GB, of which the test packs little
        add_weight(plan, stored)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        plan.start_weights()
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interrupted):
            plan.wait_for_weights()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    del plan  # waits for the piece at hand alone
