"""Adapters in the native plan equal the reference, and invalid calls are refused."""

from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.executable import CpuExecutable
from headrace.backend.reference.executable import ReferenceExecutable
from headrace.batch import RaggedBatch, ints
from headrace.config import KvConfig
from headrace.errors import UnsupportedModelError
from headrace.model import linear_weights, tensor_shapes, trace_model
from headrace.program.adapter import Adapter, LowRank, OwnWeight, adapted
from headrace.program.op import StepSize
from tests.backend.batches import Sequence, batch_of
from tests.tiny import tiny_model

SPEC, TENSORS = tiny_model(0)
KV = KvConfig((16,), 32, "f32")
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 20]]


def bf16(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    return (matrix.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def made(rank: int) -> Adapter:
    rng, shapes = np.random.default_rng(rank), tensor_shapes(SPEC)

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return bf16(rng.standard_normal((rows, cols), np.float32))

    return {
        name: LowRank(matrix(rank, shapes[name][1]), matrix(shapes[name][0], rank), 0.1)
        for name in sorted(linear_weights(SPEC))
    }


def batch(adapters: list[int]) -> RaggedBatch:
    seqs = [Sequence([2 * i, 2 * i + 1], 32) for i in range(len(PROMPTS))]
    whole = batch_of(seqs, PROMPTS, [([], [])] * len(PROMPTS), False, 1)
    some = [0, 3, 5, 9, 17, 19]  # the head and the last layer see other rows than the first layers
    return whole._replace(logit_rows=ints(some), seq_of=whole.seq_of[some], adapters=ints(adapters))


def logits(executable: Any, adapters: list[int]) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = executable.launch(batch(adapters), logits=True).wait().logits
    return rows.copy()


@pytest.mark.parametrize("isa", _native.isas())
def test_adapters_equal_the_reference(isa: str) -> None:
    program = trace_model(SPEC, TENSORS)
    ours, truth = (
        CpuExecutable(program, TENSORS, KV, 2, isa),
        ReferenceExecutable(program, TENSORS, KV),
    )
    base = logits(ours, [-1] * 4)
    for rank in (1, 5, 16, 33):
        assert ours.add_adapter(made(rank)) == truth.add_adapter(made(rank))
    for numbers in ([0, 1, 2, 3], [3, -1, 0, 2], [2, 2, -1, 2]):
        got, want = logits(ours, numbers), logits(truth, numbers)
        assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    assert (logits(ours, [-1, 3, -1, 3])[:2] == base[:2]).all() and (
        logits(ours, [-1] * 4) == base
    ).all()


def test_not_finite_adapter_spoils_only_its_own_sequences() -> None:
    executable = CpuExecutable(trace_model(SPEC, TENSORS), TENSORS, KV, 1, "")
    base = logits(executable, [-1] * 4)
    name = "layers.0.gate"
    spoilt = LowRank(
        np.full((2, SPEC.dim), np.nan, np.float32), np.ones((SPEC.ffn_dim, 2), np.float32), 1.0
    )
    rows = logits(executable, [-1, executable.add_adapter({name: spoilt}), -1, -1])
    seq_of = batch([-1] * 4).seq_of
    assert np.isnan(rows[seq_of == 1]).all() and (rows[seq_of != 1] == base[seq_of != 1]).all()


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ([(99, np.zeros((2, 8)), np.zeros((8, 2)), 1.0)], "no such weight"),
        ([(0, np.zeros((2, 8)), np.zeros((8, 3)), 1.0)], r"down is \[rank, columns\]"),
        ([(0, np.zeros((0, 8)), np.zeros((8, 0)), 1.0)], "rank of 1 to 4,096"),
        ([(0, np.zeros((2, 8)), np.zeros((8, 2)), 1.0)], "the shape of its weight"),
        ([(0, np.zeros(8), np.zeros((8, 2)), 1.0)], r"down is \[rank, columns\]"),
    ],
)
def test_adapter_matrices_of_wrong_shape_are_refused(
    matrices: list[tuple[int, Any, Any, float]], message: str
) -> None:
    plan = CpuExecutable(trace_model(SPEC, TENSORS), TENSORS, KV, 1, "").plan
    with pytest.raises(ValueError, match=message):
        plan.add_adapter(
            [
                (weight, down.astype(np.float32), up.astype(np.float32), scale)
                for weight, down, up, scale in matrices
            ]
        )
    with pytest.raises(ValueError, match="no such adapter"):
        plan.adapter_bytes(0)


def test_unknown_adapter_numbers_are_refused() -> None:
    executable = CpuExecutable(trace_model(SPEC, TENSORS), TENSORS, KV, 1, "")
    number = executable.add_adapter(made(3))
    for wrong in ([number + 1] * 4, [-2] * 4, [2**31 - 1] * 4):
        with pytest.raises(ValueError, match="no such adapter"):
            logits(executable, wrong)
    with pytest.raises(ValueError, match="a number for each sequence"):
        logits(executable, [number])
    executable.remove_adapter(number)
    with pytest.raises(ValueError, match="no such adapter"):
        logits(executable, [number] * 4)
    with pytest.raises(ValueError, match="no such adapter"):
        executable.remove_adapter(number)


def test_adapter_bytes_of_a_step() -> None:
    executable = CpuExecutable(trace_model(SPEC, TENSORS), TENSORS, KV, 1, "")
    adapter, step = made(16), StepSize(((0, 1),), 1, 4.0)
    with_it, without = (
        sum(op.bytes(step) for op in program.ops)
        for program in (adapted(executable.program, adapter), executable.program)
    )
    assert with_it - without == sum(
        2 * (matrices.down.size + matrices.up.size) for matrices in adapter.values()
    )
    held = executable.plan.adapter_bytes(executable.add_adapter(adapter))
    assert with_it - without <= held <= 1.01 * (with_it - without), "and what fills the last tiles"


def test_a_weight_that_no_op_has_is_refused() -> None:
    executable = CpuExecutable(trace_model(SPEC, TENSORS), TENSORS, KV, 1, "")
    with pytest.raises(UnsupportedModelError, match=r"layers\.7\.mlp_norm, which the model"):
        executable.add_adapter({"layers.7.mlp_norm": OwnWeight(added=np.ones(32, np.float32))})


def test_a_plan_may_share_weights_and_kv_with_another() -> None:
    with pytest.raises(TypeError):
        _native.Plan(None)  # type: ignore[call-overload]
    plan = _native.Plan("", 2)
    shared = cast(Any, _native.Plan)(plan)
    del plan
    assert shared.threads == 2 and shared.weight_bytes == 0
