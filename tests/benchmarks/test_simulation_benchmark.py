"""The record of an engine's runs, with which the simulation benchmark scales predicted times."""

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks import engine_record
from benchmarks.engine_record import EngineRecord, Factors, ScaledCosts
from headrace import AsyncLLM, SamplingParams
from headrace.measure.tiny_model import write_tiny_model
from headrace.planner.hardware import Machine
from headrace.program.op import StepSize
from tests.simulator.setups import FlatCosts

HERE = Machine("a test", "avx2", 2, 50e9, {"int8": 2e12, "bf16": 1e12, "f32": 5e11})


def test_a_record_of_requests(tmp_path: Path) -> None:
    """Three prompts of 40 tokens, and 8 tokens of output for each."""
    write_tiny_model(tmp_path, 512)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with AsyncLLM(tmp_path, backend="cpu", threads=1) as llm:
        record = EngineRecord(llm)

        async def requests() -> None:
            prompts = [[first, *range(100, 139)] for first in (1, 2, 3)]
            await asyncio.gather(
                *(llm.generate({"prompt_token_ids": prompt}, params) for prompt in prompts)
            )

        asyncio.run(requests())
        stats = llm.stats()
    sizes = [run.size(2.0) for run in record.runs]
    assert record.num_requests == 3 and len(sizes) == stats.steps
    # The last token of a request is not computed.
    assert sum(size.rows for size in sizes) == stats.rows == 3 * (40 + 7)
    assert record.busy > record.in_runs > 0

    found = record.factors(FlatCosts(2.0, 1.0, request=4.0), 2.0)
    assert found.runs == pytest.approx(record.in_runs / (3 * len(sizes)))
    assert found.around == pytest.approx((record.busy - record.in_runs) / 12)


def test_scaled_costs() -> None:
    costs = ScaledCosts(FlatCosts(2.0, 1.0, host=3.0, request=4.0), Factors(1.5, 2.0))
    assert costs.stage_seconds(StepSize(((0, 1),), 1, 2.0)) == [3.0, 1.5]
    assert (costs.schedule_seconds, costs.request_seconds) == (6.0, 8.0)


def test_a_trace_is_simulated_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "engine_record", engine_record)
    from benchmarks import simulation

    write_tiny_model(tmp_path, 40_000)
    trace = "lognormal:prompt=24,output=6,rate=100,requests=4"
    monkeypatch.setattr(simulation, "TRACES", {"a few": trace})
    monkeypatch.setattr(simulation, "MACHINES", 1)
    monkeypatch.setattr(simulation, "KV_BLOCKS", 32)
    monkeypatch.setattr(simulation, "MAX_MODEL_LEN", 512)
    monkeypatch.setattr(simulation, "measure", lambda: HERE)
    found = simulation.compare(str(tmp_path), "a few")
    assert found["measured"].keys() == found["simulated"].keys()
    assert found["factors"]["runs"] > 0 and found["factors"]["around"] > 0
    assert "with measured times" in capsys.readouterr().out
