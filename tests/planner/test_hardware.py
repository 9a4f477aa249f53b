import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.planner import hardware, host
from headrace.planner.gpu import Gpu
from headrace.planner.hardware import Machine

RATES = {"int8": 940e9, "bf16": 470e9, "f32": 235e9}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine whose figures are set, which counts how often it is measured."""
    fake = SimpleNamespace(calls=0, name="avx512", bandwidth=36e9, share=1.0)

    def read_bandwidth(threads: int, nbytes: int) -> float:
        assert nbytes == hardware.READ_BYTES
        fake.calls += 1
        return fake.bandwidth * fake.share

    fake.isa = lambda: fake.name
    fake.read_bandwidth = read_bandwidth
    fake.dot_rate = lambda kind, threads: RATES[kind] * fake.share
    monkeypatch.setattr("headrace._native", fake, raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return fake


def test_ridge() -> None:
    assert Machine("A100", "sm80", 1, 2.04e12, {"bf16": 312e12}).ridge("bf16") == pytest.approx(
        153, abs=0.5
    )
    assert Machine("H100", "sm90", 1, 3.35e12, {"bf16": 990e12}).ridge("bf16") == pytest.approx(
        296, abs=0.6
    )
    assert Machine("Zen 4", "avx512", 2, 36e9, RATES).ridge("int8") == pytest.approx(26, abs=0.2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of day, in seconds, which only tests move."""
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr("headrace.planner.hardware.time.time", lambda: clock.now)
    return clock


def test_measurement_by_threads_and_instruction_set(
    native: SimpleNamespace, clock: SimpleNamespace
) -> None:
    assert hardware.cached_machine(2) is None
    first = hardware.this_machine(2)
    assert first == hardware.cached_machine(2) == Machine(host.cpu_name(), "avx512", 2, 36e9, RATES)
    assert hardware.cached_machine(1) is None
    native.name = "portable"
    assert hardware.cached_machine(2) is None
    assert hardware.this_machine(2) == replace(first, isa="portable")
    native.name = "avx512"
    assert hardware.cached_machine(2) == first


def test_default_threads_are_the_usable_cores(
    native: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.planner.hardware.host.usable_cores", lambda: 3)
    assert hardware.this_machine().threads == 3 and hardware.this_machine(2).threads == 2
    assert (
        hardware.measure()
        == hardware.cached_machine()
        == hardware.this_machine()
        == hardware.cached_machine(3)
    )


def test_measures_until_two_readings_agree_then_hourly(
    native: SimpleNamespace, clock: SimpleNamespace
) -> None:
    for calls in (1, 2, 2, 2):
        assert hardware.this_machine(2).bandwidth == 36e9 and native.calls == calls
    for calls in (2, 2, 3, 3, 4):
        clock.now += 1800 if calls == 2 else 1801
        assert hardware.this_machine(2).bandwidth == 36e9 and native.calls == calls


@pytest.mark.parametrize(("share", "calls"), [(0.9, 2), (0.89, 3)])
def test_readings_agree_within_a_tenth(
    native: SimpleNamespace, clock: SimpleNamespace, share: float, calls: int
) -> None:
    hardware.this_machine(2)
    native.share = share
    for _ in range(2):
        hardware.this_machine(2)
    assert native.calls == calls


def test_newest_of_old_readings_counts(native: SimpleNamespace, clock: SimpleNamespace) -> None:
    for native.share in (1.0, 0.5, 0.25):
        hardware.measure(2)
    clock.now += 1e6
    assert hardware.cached_machine(2).bandwidth == 9e9


def test_slow_reading_of_a_busy_machine_does_not_count(
    native: SimpleNamespace, clock: SimpleNamespace
) -> None:
    """It counts neither as the first measurement nor after others."""
    native.share = 1 / 3
    assert hardware.this_machine(2).bandwidth == 12e9
    native.share = 1.0
    for _ in range(3):
        assert hardware.this_machine(2).bandwidth == 36e9
    assert native.calls == 3
    native.share = 1 / 3
    assert hardware.measure(2).bandwidth == 12e9  # as it is now
    assert hardware.this_machine(2) == hardware.cached_machine(2)
    assert (hardware.cached_machine(2).bandwidth, hardware.cached_machine(2).rates) == (36e9, RATES)


def test_each_rate_is_its_highest_reading(native: SimpleNamespace, clock: SimpleNamespace) -> None:
    hardware.measure(2)
    native.bandwidth, native.share = 80e9, 0.5
    hardware.measure(2)
    assert (
        hardware.cached_machine(2).bandwidth == 40e9 and hardware.cached_machine(2).rates == RATES
    )


def test_busy_machine_is_measured_five_times_an_hour(
    native: SimpleNamespace, clock: SimpleNamespace
) -> None:
    for calls in range(1, 9):
        native.share = 0.8**calls
        hardware.this_machine(2)
        assert native.calls == min(calls, 5)
    clock.now += 3601
    native.share = 0.01
    hardware.this_machine(2)
    assert native.calls == 6


def test_slower_machine_counts_after_a_day(native: SimpleNamespace, clock: SimpleNamespace) -> None:
    first = hardware.this_machine(2)
    clock.now += 24 * 3600
    native.share = 0.5
    assert hardware.this_machine(2).bandwidth == 36e9
    clock.now += 1
    assert hardware.cached_machine(2).bandwidth == hardware.this_machine(2).bandwidth == 18e9
    clock.now += 1e6
    assert hardware.cached_machine(2).bandwidth == 18e9  # old, but the only reading
    assert first.bandwidth == 36e9


def test_reading_from_the_future_does_not_count(
    native: SimpleNamespace, clock: SimpleNamespace
) -> None:
    native.share = 2
    hardware.measure(2)
    clock.now -= 10
    native.share = 1
    assert hardware.this_machine(2).bandwidth == 36e9


def test_number_of_readings_is_bounded(
    native: SimpleNamespace, clock: SimpleNamespace, tmp_path: Path
) -> None:
    for _ in range(250):
        hardware.measure(2)
    (readings,) = json.loads((tmp_path / "machine.json").read_text()).values()
    assert len(readings) == 200


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[]",
            "not json",
            '{"%s": 3}',
            '{"%s": [3]}',
            '{"%s": {"bandwidth": 1}}',
            '{"%s": [{"bandwidth": 1, "rates": {}}]}',
        ),
        '{"%s": [{"time": 1, "bandwidth": NaN, "rates": {"int8": 1, "bf16": 1, "f32": 1}}]}',
        '{"%s": [{"time": 1, "bandwidth": 1, "rates": {"int8": 1, "bf16": 0, "f32": 1}}]}',
        '{"%s": [{"time": 1, "bandwidth": 1, "rates": {"int8": Infinity, "bf16": 1, "f32": 1}}]}',
    ],
)
def test_broken_cache_is_replaced(native: SimpleNamespace, tmp_path: Path, text: str) -> None:
    hardware.measure(2)
    file = tmp_path / "machine.json"
    (key,) = json.loads(file.read_text())
    file.write_text(text.replace("%s", key))
    assert hardware.cached_machine(2) is None
    assert hardware.this_machine(2).bandwidth == 36e9
    assert hardware.cached_machine(2) is not None


def test_cache_folder_is_created(
    native: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "not" / "there"))
    assert hardware.measure(2) == hardware.cached_machine(2)


def test_unwritable_cache_is_not_an_error(
    native: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "below"))
    assert hardware.measure(2).bandwidth == 36e9
    assert hardware.cached_machine(2) is None


def test_machine_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real figures, loosely bounded: a processor reads 0.1 to 10,000 GB/s and computes 0.1 G to
    10,000 T operations a second.
    """
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    machine = hardware.measure()
    assert 1e8 < machine.bandwidth < 1e13
    assert all(1e8 < machine.rates[kind] < 1e16 for kind in hardware.KINDS)


class TestGpuMachine:
    FOUND = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, 132, (12, 8))

    @pytest.fixture
    def there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A GPU whose figures are made up."""
        from headrace.backend.cuda import measure

        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr("headrace.planner.gpu.find_gpu", lambda: (self.FOUND, ""))
        monkeypatch.setattr(measure, "read_bandwidth", lambda: 3e12)
        monkeypatch.setattr(measure, "rate", lambda kind: 1000 * RATES[kind])

    @pytest.mark.usefixtures("there")
    def test_gpu_has_its_own_rates(self, native: SimpleNamespace) -> None:
        machine = hardware.measure(2, "cuda")
        assert machine == Machine(
            self.FOUND.name, "sm_90", 132, 3e12, {kind: 1000 * rate for kind, rate in RATES.items()}
        )
        assert (
            machine == hardware.cached_machine(7, "cuda") == hardware.this_machine(backend="cuda")
            and native.calls == 0
        )
        assert machine.is_gpu and machine.at_work == "132 multiprocessors"
        assert (
            hardware.cached_machine(2) is None
            and hardware.measure(2).at_work == "2 threads"
            and not hardware.measure(1).is_gpu
        )

    @pytest.mark.usefixtures("there")
    def test_interpreted_kernels_use_the_processor(
        self, native: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert hardware.measure(2, "cuda") == hardware.cached_machine(2) and native.calls == 1
