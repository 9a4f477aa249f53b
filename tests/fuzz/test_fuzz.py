"""A short form of `make fuzz` with fixed cases, and tests of the driver."""

from pathlib import Path

import pytest

from tests.fuzz import _planted, driver

CASES = 250


@pytest.mark.parametrize("target", driver.targets())
def test_short_fuzz_run(target: str) -> None:
    outcome = driver.run_target(target, CASES)
    assert not outcome.findings and outcome.cases == CASES
    assert outcome.refused > CASES // 10


def found(folder: Path, *planted: bytes, count: int) -> tuple[driver.Outcome, dict[bytes, str]]:
    (folder / "_planted").mkdir()
    for i, content in enumerate(planted):
        (folder / "_planted" / str(i)).write_bytes(content)
    outcome = driver.run_target("_planted", count, corpus=folder)
    assert outcome.cases == count
    return outcome, {finding.content: finding.what for finding in outcome.findings}


def test_driver_finds_planted_cases(tmp_path: Path) -> None:
    outcome, what = found(
        tmp_path, b"refuse", b"raise", b"crash", b"refuse", b"loop", b"grow", count=20
    )
    assert outcome.refused > 2 and what.keys() == {b"raise", b"crash", b"loop", b"grow"}
    assert "ZeroDivisionError: planted" in what[b"raise"] and "SIGABRT" in what[b"crash"]
    assert "SIGXCPU" in what[b"loop"] and "grew by" in what[b"grow"]


def test_driver_stops_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_planted, "PATIENCE", 0.5, raising=False)
    _, what = found(tmp_path, b"return", b"wait", count=2)
    assert what == {b"wait": "it did not end within 0.5 s"}
