"""Use of the machine by the engine's steps: for the page, and in the metrics."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.planner.hardware import Machine
from headrace.planner.money import per_million
from headrace.remote.host import report_of
from headrace.sampling_params import SamplingParams
from headrace.server.metrics import Metrics
from headrace.server.step_watch import StepWatch
from tests.tiny import drain, tiny_engine, tiny_model

MACHINE = Machine("a processor", "an isa", 1, 1e9, {"int8": 4e9, "bf16": 2e9, "f32": 1e9})


@pytest.fixture
def engine() -> Any:
    """An engine as a server sees it, after a request with six steps."""
    inner = tiny_engine(tiny_model(0), "cpu", threads=1, kv_dtype="bf16")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    inner.add_request(range(20), params)
    drain(inner)
    info: Any = SimpleNamespace(threads=1, backend="cpu", kv_dtype="bf16")
    report = report_of(inner.stats())
    program = inner._loop.executable.program  # type: ignore[attr-defined]
    return SimpleNamespace(report=report, restarts=0, info=None), info, program


def gauges(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return {
        (
            sample.name.removeprefix("headrace_"),
            *(sample.labels[name] for name in ("steps", "roof") if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.labels.keys() & {"steps"}
    }


def test_use_of_the_machine_in_metrics(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.planner.hardware.cached_machine", lambda *_: MACHINE)
    remote, info, program = engine
    uses = StepWatch(program, info).uses(remote.report.figures)
    assert {kind: use.steps for kind, use in uses.items()} == {"decode_steps": 5, "prompt_steps": 1}
    assert uses["decode_steps"].tokens == 1 and uses["prompt_steps"].tokens == 20

    found = gauges(Metrics(remote, "m", StepWatch(program, info), price=2.5))
    for kind, use in uses.items():
        name = kind.removesuffix("_steps")
        assert found["mean_step_seconds", name] == use.seconds
        assert found["predicted_step_seconds", name] == use.predicted
        assert found["mbu_ratio", name, "measured"] == use.mbu["measured"] > 0
        assert found["mfu_ratio", name, "measured"] == use.mfu["measured"] > 0
        cost = per_million(2.5, use.seconds, use.tokens)
        assert found["dollars_per_million_tokens", name] == cost


def test_without_a_measurement_there_are_no_shares(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.planner.hardware.cached_machine", lambda *_: None)
    remote, info, program = engine
    assert StepWatch(program, info).uses(remote.report.figures) == {}
    found = gauges(Metrics(remote, "m", StepWatch(program, info), price=2.5))
    assert found == {("mean_step_seconds", kind): 0 for kind in ("decode", "prompt")}
