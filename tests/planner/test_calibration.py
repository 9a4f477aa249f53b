from pathlib import Path

import pytest

from headrace.planner import host
from headrace.planner.calibration import Calibration, store_calibration, stored_calibration
from headrace.planner.memory import ProcessMemory
from headrace.planner.reach import HostTime, Reach, Reaches

FOUND = Calibration(
    Reaches(
        source="a test",
        table={
            "linear": {4.5: Reach(seconds=1e-6, bandwidth=0.9, rate=0.5, unpack=3.0, overlap=6.0)},
            "rows": {32.0: Reach(seconds=1e-6, bandwidth=1.0, rate=1.0, written=5.0)},
        },
        block_rows=16,
        host=HostTime(launch=1e-5, request=1e-4),
    ),
    ProcessMemory(base=50_000_000, per_token=300.0),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path


def test_a_calibration_is_kept_by_machine_and_threads() -> None:
    assert stored_calibration() is None
    assert store_calibration(FOUND)
    assert stored_calibration() == FOUND
    assert stored_calibration(threads=99) is None


def test_other_kernels_need_another_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_calibration(FOUND)
    monkeypatch.setattr(host, "kernels_checksum", lambda: 1)
    assert stored_calibration() is None


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{", "null"])
def test_a_broken_file_counts_as_none(folder: Path, text: str) -> None:
    (folder / "calibration.json").write_text(text)
    assert stored_calibration() is None
    assert store_calibration(FOUND) and stored_calibration() == FOUND


def test_a_broken_entry_counts_as_none(folder: Path) -> None:
    assert store_calibration(FOUND)
    file = folder / "calibration.json"
    file.write_text(file.read_text().replace('"bandwidth"', '"width"'))
    assert stored_calibration() is None


def test_an_unwritable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(folder / "file"))
    assert not store_calibration(FOUND) and stored_calibration() is None
