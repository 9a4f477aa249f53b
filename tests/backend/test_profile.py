"""Profiles of executables, on every backend."""

import numpy as np
import pytest

from headrace.backend import Executable, forward
from headrace.backend_traits import BACKENDS
from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from tests.backend.batches import Sequence, batch_of
from tests.tiny import BLOCK_SIZE, tiny_executable, tiny_model

MODEL = tiny_model(6, layers=2)


@pytest.fixture(params=BACKENDS)
def executable(request: pytest.FixtureRequest) -> Executable:
    return tiny_executable(
        MODEL, request.param, KvConfig((8,), BLOCK_SIZE[request.param], "f32"), threads=2
    )


@pytest.fixture
def batch(request: pytest.FixtureRequest, executable: Executable) -> RaggedBatch:
    size = BLOCK_SIZE[request.node.callspec.params["executable"]]
    return batch_of([Sequence([0, 1], size)], [[1, 2, 3]], [([], [])], False)


def test_profiled_ops_take_at_most_the_step_time(
    executable: Executable, batch: RaggedBatch
) -> None:
    times = executable.profile(batch)
    assert all(seconds > 0 for seconds in times.ops.values())
    assert 0 < sum(times.ops.values()) <= times.wall
    assert times.barriers >= 0


def test_profile_names_ops(executable: Executable, batch: RaggedBatch) -> None:
    names = {op.name for op in executable.program.ops if op.weights() and "linear" in op.name} | {
        "attention"
    }
    assert names <= set(executable.profile(batch).ops)


def test_profile_starts_from_zero(executable: Executable, batch: RaggedBatch) -> None:
    first, second = executable.profile(batch), executable.profile(batch)
    assert first.ops.keys() == second.ops.keys() and first.barriers == second.barriers
    assert sum(second.ops.values()) <= second.wall


def test_profiling_changes_no_bit(executable: Executable, batch: RaggedBatch) -> None:
    plain = forward(executable, batch).logits.copy()
    executable.profile(batch)
    assert np.array_equal(forward(executable, batch).logits, plain)
