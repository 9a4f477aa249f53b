"""A short form of `make fuzz`, with the same cases each time; and that the driver sees what it must."""

from pathlib import Path

import pytest

from tests.fuzz import driver

CASES = 250


@pytest.mark.parametrize("target", driver.targets())
def test_a_short_run(target: str) -> None:
    outcome = driver.run_target(target, CASES)
    assert not outcome.findings and outcome.cases == CASES
    assert outcome.refused > CASES // 10


def test_the_driver_notices(tmp_path: Path) -> None:
    planted = {"1": b"raise", "2": b"crash", "3": b"refuse", "4": b"hang", "5": b"grow"}
    (tmp_path / "_planted").mkdir()
    for name, content in planted.items():
        (tmp_path / "_planted" / name).write_bytes(content)
    outcome = driver.run_target("_planted", 20, corpus=tmp_path)
    assert outcome.cases == 20 and outcome.refused > 1
    found = {finding.label: (finding.what, finding.content) for finding in outcome.findings}
    assert found.keys() == {"1", "2", "4", "5"}
    assert "ZeroDivisionError: planted" in found["1"][0] and found["2"] == (found["2"][0], b"crash")
    assert "SIGABRT" in found["2"][0] and "did not end within 1 s" in found["4"][0] and "grew by" in found["5"][0]
