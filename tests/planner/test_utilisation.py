"""MBU and MFU: the work of real steps, from their sums."""

from typing import Any

import numpy as np
import pytest

from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from headrace.planner.hardware import Machine
from headrace.planner.utilisation import (
    DATASHEET,
    MEASURED,
    NO_WORK,
    RecentSteps,
    UseMeter,
    Work,
    mean_steps,
    planned,
    roofs_of,
)
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.sampling_params import SamplingParams
from headrace.stats import NO_STEPS, StepTotals
from tests.random_trees import RandomTrees
from tests.tiny import BLOCK_SIZE, drain, tiny_engine, tiny_executable, tiny_model

MACHINE = Machine("a processor", "an isa", 1, 1e9, {"int8": 4e9, "bf16": 2e9, "f32": 1e9})


class TestWork:
    def test_shares_of_a_machine(self) -> None:
        work = Work(5e8, {"int8": 1e9, "f32": 1e8}).plus(Work(1e8, {"int8": 1e9}), 2)
        assert work == Work(7e8, {"int8": 3e9, "f32": 1e8})
        assert work.mbu(2, MACHINE) == pytest.approx(0.35)
        assert work.mfu(2, MACHINE) == pytest.approx((0.75 + 0.1) / 2)
        assert NO_WORK.mbu(0, MACHINE) == NO_WORK.mfu(0, MACHINE) == 0


class TestMeanSteps:
    def test_a_mean_between_two_numbers_gives_both(self) -> None:
        totals = StepTotals(steps=10, seqs=23, rows=23, context=230, logit_rows=23)
        steps = list(mean_steps(totals, 2))
        assert [(round(weight, 9), step) for weight, step in steps] == [
            (0.7, StepSize(((10, 1),) * 2, 2, 2)),
            (0.3, StepSize(((10, 1),) * 3, 3, 2)),
        ]

    def test_prompts_join_sequences_that_decode(self) -> None:
        totals = StepTotals(
            steps=2,
            seqs=4,
            rows=4,
            context=40,
            prompts=2,
            prompt_rows=15,
            prompt_context=16,
            logit_rows=6,
        )
        assert list(mean_steps(totals, 2)) == [(1, StepSize(((10, 1), (10, 1), (8, 8)), 3, 2))]

    def test_no_steps(self) -> None:
        assert list(mean_steps(NO_STEPS, 2)) == []


class Recorder:
    """An executable that keeps the size of each launch."""

    def __init__(self, inner: Any, kv_bytes: float) -> None:
        self.inner, self.kv_bytes = inner, kv_bytes
        self.steps: list[StepSize] = []

    def launch(self, batch: RaggedBatch, *args: Any, **named: Any) -> Any:
        rows = np.diff(batch.row_start).tolist()
        seqs = tuple(zip(batch.context_len.tolist(), rows, strict=True))
        self.steps.append(StepSize(seqs, len(batch.logit_rows), self.kv_bytes))
        return self.inner.launch(batch, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_step_ms": 1000},
        {"max_num_batched_tokens": 8},
        {"slots": 128},
        {"proposer": RandomTrees(0, 61, {}, max_nodes=3)},
    ],
    ids=["one step at a time", "several steps at once", "chunks", "preemption", "drafts"],
)
def test_sums_of_steps_give_the_bytes_and_operations_of_all_steps(
    options: dict[str, Any],
) -> None:
    made = tiny_model(0)
    kv = KvConfig((options.get("slots", 256) // BLOCK_SIZE["cpu"],), BLOCK_SIZE["cpu"], "bf16")
    inner = tiny_executable(made, "cpu", kv)
    kv_bytes = number_bytes(inner.program.kv_groups, "bf16")
    recorder = Recorder(inner, kv_bytes)
    engine = tiny_engine(made, "cpu", executable=recorder, kv_dtype="bf16", threads=1, **options)
    for number in range(5):
        params = SamplingParams(temperature=0, max_tokens=10 + 5 * number, ignore_eos=True)
        engine.add_request(range(1 + 3 * number, 20), params)
    drain(engine)

    stats = engine.stats()
    assert stats.decode_steps.steps + stats.prompt_steps.steps == stats.steps
    timer = planned(inner.program, "cpu", 1, MACHINE)
    meter = UseMeter(inner.program, kv_bytes, {MEASURED: MACHINE}, timer)
    exact = [meter.of_launches([step], 1.0) for step in recorder.steps]
    uses = [meter.of(totals) for totals in (stats.decode_steps, stats.prompt_steps)]
    for name, tolerance in {"bytes": 0.005, "flops": 0.03}.items():
        total = sum(use.steps * getattr(use, name) for use in uses if use)
        assert total == pytest.approx(sum(getattr(use, name) for use in exact), rel=tolerance), name

    predicted = sum(use.steps * (use.predicted or 0) for use in uses if use)
    assert timer and predicted == pytest.approx(sum(map(timer.seconds, recorder.steps)), rel=0.05)

    decode, totals = uses[0], stats.decode_steps
    assert decode and decode.seconds == pytest.approx(totals.seconds / totals.steps)
    assert decode.mbu[MEASURED] == pytest.approx(decode.bytes / decode.seconds / 1e9)
    assert decode.error == pytest.approx((decode.predicted or 0) / decode.seconds - 1)


class TestRecentSteps:
    def test_totals_since_the_reading_of_some_seconds_ago(self) -> None:
        recent = RecentSteps(seconds=4)
        seen = [
            recent.update(now, {"decode": StepTotals(steps=steps, seconds=steps / 10)})
            for now, steps in [(0, 10), (1, 20), (4.5, 50), (6, 60), (30, 90), (31, 5)]
        ]
        assert [totals["decode"].steps for totals in seen] == [10, 10, 40, 40, 30, 5]


def test_roofs_of_a_known_gpu_have_its_datasheet() -> None:
    gpu = Machine("NVIDIA H100 80GB HBM3", "sm_90", 132, 2.9e12, {"int8": 1, "bf16": 2, "f32": 3})
    roofs = roofs_of(gpu)
    assert roofs.keys() == {MEASURED, DATASHEET} and roofs[MEASURED] == gpu
    assert roofs[DATASHEET].bandwidth == 3350e9
    assert roofs_of(MACHINE) == {MEASURED: MACHINE}
