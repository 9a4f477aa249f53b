from itertools import product

import pytest

from headrace.measure import adapter_time, machine_calibration
from headrace.measure.least_squares import fit_factors
from headrace.measure.machine_calibration import _Seen
from headrace.planner.hardware import Machine
from headrace.planner.memory import ProcessMemory
from headrace.planner.reach import HostTime

HERE = Machine("a test", "avx2", 2, 50e9, {"int8": 2e12, "bf16": 1e12, "f32": 5e11})


def test_factors_of_columns() -> None:
    columns = [[1.0, 3.0], [1.0, 5.0], [2.0, 9.0]]
    assert fit_factors(columns, [7.0, 11.0, 20.0]) == pytest.approx([1.0, 2.0])
    # A factor that would be negative is 0, and the others fit without it.
    first, second = fit_factors(columns, [2.0, 4.0, 7.0])
    assert first == 0 and 0.6 < second < 1
    assert fit_factors(columns, [1.5, 2.5, 4.5], (0.0, 1.0)) == pytest.approx([0.0, 1.0])
    assert fit_factors(columns, [0.0, 0.0, 0.0]) == [0.0, 0.0]


def seen(rows: int, blocks: int, size: float, part: str) -> _Seen:
    """A step of products with known factors: 2 us, 80 %, 50 %, 4 rows a block, 100 operations."""
    calls, memory, arithmetic = 40.0, size * 1e-4, size * rows * 2e-5
    unpack, written = arithmetic * blocks / rows, rows * (1 + size) * 1e-6
    busy = arithmetic / 0.5 + 4 * unpack / 0.5 + 100 * written
    seconds = calls * 2e-6 + (memory / 0.8 if rows == 1 else busy)
    return _Seen(part, 4.5, rows, calls, memory, arithmetic, unpack, written, seconds)  # type: ignore[arg-type]


def test_known_factors_are_found() -> None:
    sizes = ((1, 1), (17, 2), (24, 2), (32, 2), (40, 3), (128, 8))
    steps = [
        seen(rows, blocks, size, "linear") for (rows, blocks), size in product(sizes, (1.0, 3.0))
    ]
    other = _Seen("rows", 32.0, 4, 10.0, 0.0, 0.0, 0.0, 1e-6, 1.2e-4)
    table = machine_calibration._fit_table(
        {("Q4_0", False): steps, ("Q4_0", True): steps},
        {"attention": [other], "rows": [other]},
    )
    found = table["linear"][4.5]
    assert found.seconds == pytest.approx(2e-6) and found.bandwidth == pytest.approx(0.8)
    assert found.rate == pytest.approx(0.5) and found.unpack == pytest.approx(4.0)
    assert found.written == pytest.approx(100.0)
    assert table["head"] == table["qkv"]


def test_a_calibration_of_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    small = machine_calibration._SHAPES["narrow"] | sizes | {"vocab_size": 256}
    monkeypatch.setattr(machine_calibration, "_SHAPES", {"narrow": small, "wide": small})
    monkeypatch.setattr(machine_calibration, "_FORMATS", ("Q4_0", "BF16"))
    monkeypatch.setattr(machine_calibration, "_TURNS", 1)
    monkeypatch.setattr(machine_calibration, "_SECONDS", 0.0)
    monkeypatch.setattr(machine_calibration, "_CONTEXTS", (((100, 1),) * 2, ((0, 32),)))
    monkeypatch.setattr("headrace.planner.hardware.measure", lambda *args: HERE)
    monkeypatch.setattr("headrace.planner.hardware.bandwidth_now", lambda *args: HERE.bandwidth)
    monkeypatch.setattr(
        machine_calibration, "measure_engine", lambda host, *_: HostTime(request=1e-4)
    )
    monkeypatch.setattr(
        machine_calibration, "measure_process", lambda: ProcessMemory(base=1, per_token=1.0)
    )
    monkeypatch.setattr(adapter_time, "_TURNS", 1)
    monkeypatch.setattr(adapter_time, "_SECONDS", 0.0)
    found = machine_calibration.calibrate_machine()
    assert found.reaches.host.request == 1e-4 and found.process.base == 1
    table = found.reaches.table
    assert {"linear", "qkv", "head", "attention", "adapter", "rows"} == table.keys()
    assert sorted(table["linear"]) == [4.5, 16.0]
    # Over int4 and int8, a head of 64 numbers has a scale.
    assert sorted(table["attention"]) == [4.5, 8.5, 16.0]
    assert list(table["adapter"]) == [16.0]
