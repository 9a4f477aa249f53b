"""Simulated times of steps through the stages of a pipeline, and the idle time of ranks."""

import numpy as np
import pytest

from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh
from headrace.planner.pipeline_picture import idle_share, pipeline_svg
from headrace.program.op import StepSize
from headrace.program.trace import Program
from tests.backend.batches import Sequence, batch_of
from tests.parallel.lockstep import LockStep
from tests.parallel.models import predicted_seconds
from tests.tiny import tiny_model

ROWS = 2


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_idle_share_follows_the_formula(stages: int, steps: int) -> None:
    """Stages cut by bytes, the head included, are idle as long as equal stages, within 0.05."""
    sizes = {"layers": 22, "dim": 64, "heads": 2, "kv_heads": 2, "ffn": 96, "vocab": 80}
    spec, tensors = tiny_model(1, format="Q8_0", tied_embeddings=False, **sizes)
    program, mesh = trace_model(spec, tensors), Mesh(1, stages)
    ranks = [[mesh.program(program, rank) for rank in mesh.group(stage)] for stage in range(stages)]
    kv = KvConfig((16,), 16, "f32")
    many, one = LockStep(ranks, tensors, kv), LockStep([[program]], tensors, kv)
    batches = [
        batch_of(
            [Sequence([2 * number, 2 * number + 1], 16)],
            [[number + i for i in range(ROWS)]],
            [([], [])],
            False,
        )
        for number in range(steps)
    ]
    stage_steps = many.stage_steps(batches, predicted_seconds)
    assert [(step.rank, step.number) for step in stage_steps] == [
        (rank, number) for number in range(steps) for rank in range(stages)
    ]
    assert idle_share(stage_steps) == pytest.approx((stages - 1) / (steps + stages - 1), abs=0.05)
    total = one.stage_steps(batches, predicted_seconds)
    assert sum(step.end - step.begin for step in stage_steps) == pytest.approx(
        total[-1].end, rel=0.01
    )
    for logits, expected in zip(many.logits(batches[-1]), one.logits(batches[-1]), strict=True):
        np.testing.assert_array_equal(logits, expected)


def test_stage_waits_for_the_previous_stage() -> None:
    spec, tensors = tiny_model(1, layers=2)
    program, mesh = trace_model(spec, tensors), Mesh(1, 2)
    stages = [[mesh.program(program, rank)] for rank in (1, 0)]
    batch = batch_of([Sequence([0], 32)], [[1, 2]], [([], [])], False)

    def seconds(stage: Program, _: RaggedBatch) -> float:
        return 3.0 if stage.logits else 1.0

    stage_steps = LockStep(stages, tensors, KvConfig((1,), 32, "f32")).stage_steps(
        [batch] * 2, seconds
    )
    assert [tuple(step) for step in stage_steps] == [
        (0, 0, 0.0, 1.0),
        (1, 0, 1.0, 4.0),
        (0, 1, 1.0, 2.0),
        (1, 1, 4.0, 7.0),
    ]
    assert idle_share(stage_steps) == pytest.approx(1 - 8 / 14)
    picture = pipeline_svg("Two <stages>", stage_steps)
    assert (
        picture.count("<title>step") == 4 and "Two &lt;stages&gt;" in picture and "43 %" in picture
    )
    assert "step 1 on rank 1: 3000.0 ms" in picture


def test_predicted_seconds_count_the_head() -> None:
    spec, tensors = tiny_model(1, vocab=512, layers=1)
    program = trace_model(spec, tensors)
    batch = batch_of([Sequence([0], 32)], [[1, 2]], [([], [])], False)
    size = StepSize(((0, 2),), 2, 4)
    head = next(op for op in program.ops if op.output() == program.logits)
    assert head.bytes(size) > sum(op.bytes(size) for op in program.ops) / 2
    assert predicted_seconds(program, batch) == pytest.approx(
        sum(op.bytes(size) for op in program.ops)
    )
