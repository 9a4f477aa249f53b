import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.planner import hardware
from headrace.planner.hardware import Machine

RATES = {"int8": 940e9, "bf16": 470e9, "f32": 235e9}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine whose figures are known, which counts how often it is measured."""
    fake = SimpleNamespace(calls=0, name="avx512")

    def read_bandwidth(threads: int, nbytes: int) -> float:
        fake.calls += 1
        return 36e9

    fake.isa = lambda: fake.name
    fake.read_bandwidth = read_bandwidth
    fake.dot_rate = lambda kind, threads: RATES[kind]
    monkeypatch.setattr("headrace._native", fake, raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return fake


def test_ridge() -> None:
    assert Machine("A100", "sm80", 1, 2.04e12, {"bf16": 312e12}).ridge("bf16") == pytest.approx(153, abs=0.5)
    assert Machine("H100", "sm90", 1, 3.35e12, {"bf16": 990e12}).ridge("bf16") == pytest.approx(296, abs=0.6)
    assert Machine("Zen 4", "avx512", 2, 36e9, RATES).ridge("int8") == pytest.approx(26, abs=0.2)


def test_measured_once_for_each_thread_count_and_instruction_set(native: SimpleNamespace) -> None:
    assert hardware.remembered(2) is None
    first = hardware.this_machine(2)
    assert first == hardware.this_machine(2) == hardware.remembered(2)
    assert first.bandwidth == 36e9 and first.rates == RATES and first.threads == 2 and native.calls == 1
    hardware.this_machine(1)
    assert native.calls == 2
    native.name = "portable"
    assert hardware.remembered(2) is None
    hardware.this_machine(2)
    native.name = "avx512"
    assert hardware.remembered(2) == first and native.calls == 3


def test_an_old_measurement_is_remembered_but_no_longer_trusted(native: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hardware.this_machine(2)
    now = time.time()
    monkeypatch.setattr("headrace.planner.hardware.time.time", lambda: now + 7200)
    native.read_bandwidth = lambda threads, nbytes: 20e9  # a neighbour is busy
    assert hardware.remembered(2) == first
    assert hardware.this_machine(2).bandwidth == 20e9
    assert hardware.this_machine(2) == hardware.remembered(2) != first


@pytest.mark.parametrize("text", ["", "[]", "not json", '{"%s": 3}', '{"%s": {"bandwidth": 1}}', '{"%s": {"bandwidth": 1, "rates": {}}}'])
def test_a_broken_cache_is_measured_over(native: SimpleNamespace, tmp_path: Path, text: str) -> None:
    hardware.measure(2)
    file = tmp_path / "machine.json"
    (key,) = json.loads(file.read_text())
    file.write_text(text.replace("%s", key))
    assert hardware.remembered(2) is None
    assert hardware.this_machine(2).bandwidth == 36e9
    assert hardware.remembered(2) is not None


def test_a_cache_that_cannot_be_written_is_no_error(native: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "below"))
    assert hardware.measure(2).bandwidth == 36e9
    assert hardware.remembered(2) is None


def test_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real figures, loosely bounded: a processor reads 0.1 to 10,000 GB/s and computes 0.1 G to 10,000 T operations a second."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    machine = hardware.measure()
    assert 1e8 < machine.bandwidth < 1e13
    assert all(1e8 < machine.rates[kind] < 1e16 for kind in hardware.KINDS)
