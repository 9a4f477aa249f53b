"""`bench_latency`, `bench_throughput`, and the runs and speed limits that they are made of."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.backend import lower_program
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.measure.bench import Bench, Run, SpeedLimits
from headrace.model import trace_model
from headrace.planner.hardware import Machine
from headrace.planner.roofline import step_seconds
from headrace.program.op import StepSize
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

MACHINE = Machine("a processor", "an isa", 1, 1e9, {"int8": 1e12, "bf16": 1e12, "f32": 1e12})


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of known speed: measuring this one takes half a second each time."""
    monkeypatch.setattr("headrace.planner.hardware.measure", lambda threads, backend="cpu": MACHINE)


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    """A model of 264 tokens, with a context of 256."""
    path: Path = write_gguf()
    return str(path)


class TestPublicFunctions:
    def test_bench_latency(self, model: str) -> None:
        steps: list[str] = []
        rows = list(
            headrace.bench_latency(
                model,
                prompt_tokens=[16],
                output_tokens=[4],
                depths=[0, 8],
                repetitions=2,
                on_progress=lambda step, share: steps.append(step),
                threads=1,
                kv_dtype="f32",
                price=3.6,
            )
        )
        assert [(row.test, row.depth) for row in rows] == [
            ("pp16", 0),
            ("tg4", 0),
            ("pp16", 8),
            ("tg4", 8),
        ]
        for row in rows:
            assert row.tokens_per_second_min <= row.tokens_per_second <= row.tokens_per_second_max
            assert row.setup.machine == MACHINE and row.setup.kv_dtype == "f32"
            assert row.facts()["kind"] == "latency" and row.facts()["threads"] == 1
            # A dollar is 1,000 seconds.
            assert row.dollars_per_million == pytest.approx(1000 / row.tokens_per_second)
            # At depth 0 a prompt of one token is a decode step, too.
            num_steps = 2 if row.test.startswith("pp") else 2 * (4 if row.depth else 5)
            assert row.use and row.use.steps == num_steps
        assert steps[0] == "measuring this machine" and "4 tokens at depth 8" in steps

    def test_bench_throughput(self, model: str) -> None:
        rows = list(
            headrace.bench_throughput(
                model, concurrency=[1, 2], prompt_tokens=8, output_tokens=3, threads=1, price=3.6
            )
        )
        assert [row.concurrency for row in rows] == [1, 2]
        assert all(row.facts()["kind"] == "throughput" and row.between_tokens for row in rows)
        for row in rows:
            count, cost = row.concurrency, row.dollars_per_million
            assert cost and 1000 * row.samples["seconds"] == pytest.approx(
                count * (8 * cost["prompt"] + 3 * cost["output"])
            )
            assert row.uses.keys() == {"prompt", "decode"}
            seconds = row.samples["seconds"]
            assert 0.5 * seconds < sum(astuple(row.timing)) <= seconds

    def test_lengths_are_checked_before_anything_is_measured(self, model: str) -> None:
        with pytest.raises(RequestError, match="a context of 302 tokens"):
            headrace.bench_latency(model, prompt_tokens=[300], output_tokens=[0], depths=[0])
        with pytest.raises(RequestError, match="set at least one above 0"):
            headrace.bench_latency(model, prompt_tokens=[0], output_tokens=[])
        with pytest.raises(RequestError, match="threads"):
            headrace.bench_throughput(model, threads=-1)


class TestBench:
    def test_time_within_a_step_is_shared_by_its_rows(self) -> None:
        run = Run([[3.0]], [(10, 1.0), (20, 3.0)], [], {})
        assert [run.seconds_at(row) for row in (0, 5, 10, 15, 20)] == [0, 0.5, 1, 2, 3]

    def test_prompts_are_new_every_time_and_repeatable(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def prompts() -> list[list[int]]:
            seen: list[list[int]] = []
            with Bench(model, EngineConfig(backend="cpu", max_model_len=64, threads=1)) as bench:
                add = bench._engine.add_request
                monkeypatch.setattr(
                    bench._engine,
                    "add_request",
                    lambda ids, params: seen.append(ids) or add(ids, params),
                )
                runs = [bench.run(2, 12, 3), *bench.repeat(2, 12, 3)]
            assert [[len(times) for times in run.tokens] for run in runs] == [[3, 3], [3], [3]]
            assert all(
                run.rows[-1][0] == len(run.tokens) * (12 + 2) for run in runs
            )  # the last token has no row of its own
            return seen

        first = prompts()
        assert len(first) == len({tuple(ids) for ids in first}) == 2 + 3 and {
            len(ids) for ids in first
        } == {12}
        assert all(0 <= token < 264 for ids in first for token in ids)
        assert prompts() == first

    def test_speed_limits_are_step_times(self, model: str) -> None:
        with Bench(model, EngineConfig(backend="cpu", max_model_len=64, threads=1)) as bench:
            checkpoint = bench.checkpoint
        limits = SpeedLimits(checkpoint, MACHINE, EngineConfig(backend="cpu", kv_dtype="f32"))
        program = lower_program(
            "cpu", trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors
        )
        step = {
            rows: step_seconds(program, StepSize(((20, 1),) * rows, rows, 4), MACHINE)
            for rows in (1, 3)
        }
        assert limits.decode(8, 16) == pytest.approx(1 / step[1])
        assert limits.decode(8, 16, 3) == pytest.approx(3 / step[3])
        whole, half = (
            step_seconds(program, StepSize(((0, rows),), 1, 4), MACHINE) for rows in (64, 32)
        )
        assert limits.prompt(64, 0) == pytest.approx(64 / whole)
        assert limits.prompt(32, 32) == pytest.approx(32 / (whole - half))
        prompts = step_seconds(program, StepSize(((0, 16),) * 3, 3, 4), MACHINE)
        assert limits.output(3, 16, 9) == pytest.approx(27 / (prompts + 8 * step[3]))
        assert limits.output(3, 16, 1) == pytest.approx(3 / prompts)
