"""`headrace.profile` and `headrace.selftest`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import RequestError
from headrace.planner.hardware import Machine
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

MACHINE = Machine("a processor", "an isa", 1, 1e9, {"int8": 1e12, "bf16": 1e12, "f32": 1e12})


@pytest.fixture
def model(write_gguf: Any, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """A tiny model, on a machine that is not measured."""
    monkeypatch.setattr(
        "headrace.planner.hardware.measure",
        lambda threads, backend="cpu": replace(MACHINE, threads=threads),
    )
    path: Path = write_gguf()
    return str(path)


def test_profile_reports_each_phase(model: str) -> None:
    steps: list[tuple[str, float]] = []
    report = headrace.profile(
        model,
        prefill=[16],
        depths=[8],
        batches=[1, 2],
        turns=2,
        on_progress=lambda step, share: steps.append((step, share)),
        backend="cpu",
        threads=1,
    )
    names = ["prefill 16", "decode, depth 8, batch 1", "decode, depth 8, batch 2"]
    assert [profile.phase.name for profile in report.profiles] == names
    assert report.machine.threads == 1 and len(report.machines) == 3
    assert not report.skipped and not report.experts
    assert all(profile.wall > 0 and profile.floor > 0 for profile in report.profiles)
    assert [step for step, _ in steps] == ["loading", *names, *names]
    assert steps[-1][1] == pytest.approx(5 / 6)


def test_profile_skips_default_lengths_beyond_the_context(model: str) -> None:
    report = headrace.profile(model, batches=[1], turns=1, threads=1)
    assert [profile.phase.name for profile in report.profiles] == ["decode, depth 128, batch 1"]
    assert "needs 2,048 tokens of context" in report.skipped["prefill 2,048"]


def test_profile_refuses_lengths_beyond_the_context(model: str) -> None:
    with pytest.raises(RequestError, match="prefill 257 is too long"):
        headrace.profile(model, prefill=[257])
    with pytest.raises(RequestError, match="no phase to profile"):
        headrace.profile(model, prefill=[], depths=[])


def test_selftest() -> None:
    checks = headrace.selftest(threads=1)
    assert len(checks) == 6 and all(check.ok for check in checks)
    assert {check.name.partition(":")[0] for check in checks} == {"cpu"}
