"""The JSON of a profile: raw numbers, and the shares that follow from them."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.measure.experts import ExpertProfile
from headrace.measure.op_profile import OpProfile, PhaseProfile, decode_phase
from headrace.measure.profile_report import ProfileReport
from headrace.planner.hardware import Machine
from headrace.planner.utilisation import StepUse
from tests.tiny import tiny_model

MACHINE = Machine("Zen 4", "avx512", 2, 40e9, {"int8": 800e9, "bf16": 400e9, "f32": 200e9})
BUSY = Machine("Zen 4", "avx512", 2, 30e9, {"int8": 700e9, "bf16": 400e9, "f32": 200e9})
LINEAR = OpProfile(
    name="linear",
    calls=8,
    seconds=0.004,
    bytes=80_000_000,
    flops=800_000_000,
    kind="int8",
    memory_seconds=0.002,
    arithmetic_seconds=0.001,
    floor=0.0025,
)
UNTIMED = OpProfile(
    name="norm",
    calls=4,
    seconds=0.0,
    bytes=1000,
    flops=2000,
    kind="f32",
    memory_seconds=1e-6,
    arithmetic_seconds=1e-6,
    floor=0.0015,
)
LINEAR_FACTS = {
    "op": "linear",
    "calls": 8,
    "seconds": 0.004,
    "share": 0.8,
    "bytes": 80_000_000,
    "bytes_per_second": 20e9,
    "share_of_bandwidth": 0.5,
    "operations": 800_000_000,
    "operations_per_second": 200e9,
    "kind": "int8",
    "share_of_rate": 0.25,
    "floor": 0.0025,
    "link_bytes": 0,
    "bound": "memory",
}
UNTIMED_FACTS = {
    "op": "norm",
    "calls": 4,
    "seconds": 0.0,
    "share": 0.0,
    "bytes": 1000,
    "bytes_per_second": 0.0,
    "share_of_bandwidth": 0.0,
    "operations": 2000,
    "operations_per_second": 0.0,
    "kind": "f32",
    "share_of_rate": 0.0,
    "floor": 0.0015,
    "link_bytes": 0,
    "bound": "unknown",
}


USE = StepUse(
    steps=2,
    seconds=0.0025,
    predicted=0.003,
    bytes=1e6,
    flops=2e6,
    mbu={"measured": 0.4},
    mfu={"measured": 0.1},
)
USE_FACTS = {
    "steps": 2,
    "seconds": 0.0025,
    "predicted": 0.003,
    "bytes": 1e6,
    "flops": 2e6,
    "mbu": {"measured": 0.4},
    "mfu": {"measured": 0.1},
    "tokens": 0.0,
    "error": pytest.approx(0.2),
}


def test_profile_report_as_json() -> None:
    """Two steps of four sequences, three times: 5 ms at the median, of which the ops take 4; they
    could not take less than 4.
    """
    once = decode_phase(100, 4, 2)
    profile = PhaseProfile(
        phase=replace(once, steps=once.steps * 2),
        ops=(LINEAR, UNTIMED),
        walls=(0.005, 0.004, 0.008),
        outside=0.001,
        barriers=12,
    )
    routing = ExpertProfile(
        phase="decode", num_experts=2, loads=np.array([[1, 3]]), expected=1.5, measured=2.0
    )
    report = ProfileReport(
        model="org/model",
        spec=tiny_model(0, layers=3)[0],
        kv_dtype="int8",
        machines=[MACHINE, BUSY],
        machine=MACHINE,
        profiles=[profile],
        uses=[USE],
        skipped={"prefill 9": "too long"},
        experts=[routing],
    )
    assert report.expert_loads() == [[1, 3]]
    assert report.title == "tiny-0 on Zen 4, 2 threads"
    phase = {
        "name": "decode, depth 100, batch 4",
        "batch": 4,
        "depth": 100,
        "tokens": 4,
        "steps": 2,
        "rounds": 3,
        "wall": {"median": 0.005, "min": 0.004, "max": 0.008},
        "floor": 0.004,
        "tokens_per_second": 800.0,
        "limit": 1000.0,
        "barriers": 12,
        "barriers_per_layer": 2.0,
        "outside_ops": 0.001,
        "ops": [LINEAR_FACTS, UNTIMED_FACTS],
        "use": USE_FACTS,
    }
    experts = {
        "phase": "decode",
        "experts": 2,
        "distinct_expected": 1.5,
        "distinct": 2.0,
        "max_load": 1.5,
        "min_load": 0.5,
        "loads": [[1, 3]],
    }
    assert report.facts() == {
        "model": "org/model",
        "name": "tiny-0",
        "layers": 3,
        "kv_dtype": "int8",
        "cpu": "Zen 4",
        "isa": "avx512",
        "threads": 2,
        "machine": {"bandwidth": 40e9, "rates": {"int8": 800e9, "bf16": 400e9, "f32": 200e9}},
        "measurements": [
            {"bandwidth": 40e9, "rates": {"int8": 800e9, "bf16": 400e9, "f32": 200e9}},
            {"bandwidth": 30e9, "rates": {"int8": 700e9, "bf16": 400e9, "f32": 200e9}},
        ],
        "phases": [phase],
        "skipped": {"prefill 9": "too long"},
        "experts": [experts],
    }
