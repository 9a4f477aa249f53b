"""Whatever a plan is told to do, and whatever batch it is given, Python gets an exception or an answer, and the process goes on."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from tests.backend.stored import random_stored

WIDTHS = st.sampled_from([1, 16, 32, 33, 64, 96])
IDS = st.integers(-2, 7)
EXTREMES = [-(2**31), -1, 0, 1, 2, 31, 32, 33, 64, 2**30, 2**31 - 1]
FLAGS = st.booleans()
LAYERS = st.tuples(st.integers(-1, 2), st.integers(-1, 2))
BUILDER: dict[str, list[st.SearchStrategy[Any]]] = {
    "add_buffer": [WIDTHS | st.sampled_from(EXTREMES), FLAGS, FLAGS],
    "embed": [IDS, IDS],
    "input": [IDS],
    "norm": [IDS, IDS, IDS, st.sampled_from([1e-5, 0.0, -1.0, float("nan")])],
    "rope_angles": [st.lists(st.floats(0, 1), max_size=40), st.just(1.0), st.sampled_from([2, 16, 32, *EXTREMES])],
    "rope": [IDS, IDS, IDS, st.sampled_from([2, 16, 32, *EXTREMES])],
    "pack": [IDS, IDS],
    "gather_rows": [IDS, IDS],
    "add": [IDS, IDS, IDS],
    "glu": [IDS, IDS, IDS],
    "silu": [IDS, IDS],
    "linear": [IDS, IDS, IDS, IDS, IDS, FLAGS],
    "glu_linear": [IDS, IDS, IDS, IDS, IDS, IDS],
    "qkv_rope_write": [IDS, IDS, IDS, st.tuples(IDS, IDS, IDS), st.tuples(IDS, IDS, IDS), LAYERS],
    "kv_write": [IDS, IDS, LAYERS],
    "attention": [IDS, IDS, LAYERS, st.sampled_from([1, 2, 3, *EXTREMES]), st.just(1.0)],
    "add_program": [],
    "floats": [IDS, st.sampled_from(EXTREMES)],
}
"""Calls of the builder, with the strategies of their arguments."""
CALLS = st.sampled_from(sorted(BUILDER)).flatmap(lambda name: st.tuples(st.just(name), st.tuples(*BUILDER[name])))


def attempt(call: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a call is accepted; it may be refused by nothing but these."""
    try:
        call(*arguments)
    except (ValueError, TypeError, MemoryError):
        return False
    return True


def furnished(data: st.DataObject | None) -> _native.Plan:
    """A plan with some of everything, so that ids are often right; without `data`, one that runs."""
    plan = _native.Plan("", data.draw(st.sampled_from([1, 2])) if data else 1)
    for head_dim, window, kv_dtype in ((16, 0, "f32"), (32, 5, "int8")):
        plan.add_kv_group(2, 1, head_dim, window, 2, kv_dtype)
    for rows, cols, name in ((32, 32, "Q8_0"), (64, 32, "F32"), (32, 64, "Q4_1"), (16, 32, "BF16")):
        tensor = random_stored(name, rows, cols, 0)
        plan.add_weight(name, rows, cols, tensor.parts["codes"], None, tensor.parts.get("row_scales"))
    for width in (16, 32, 64):
        plan.add_vector(np.ones(width, np.float32))
    for width, logit, packed in ((32, False, False), (32, False, True), (64, False, False), (32, True, False), (16, False, False)):
        plan.add_buffer(width, logit, packed)
    if data is None or data.draw(FLAGS):  # something that runs, for batches to try
        rows, packed, wide, logits, narrow = range(5)
        angles, queries = plan.rope_angles([1.0, 0.1], 1.0, 16), plan.add_buffer(32, False, False)
        plan.embed(rows, 1)
        plan.norm(rows, rows, 1, 1e-5)
        plan.pack(packed, rows)
        plan.qkv_rope_write(queries, packed, angles, (0, 3, 3), (-1, 0, 0), (0, 0))
        plan.attention(rows, queries, (0, 0), 2, 0.25)
        plan.kv_write(rows, queries, (1, 1))
        plan.attention(queries, rows, (1, 1), 1, 0.2)
        plan.linear(wide, packed, 1, 2, -1, False)
        plan.linear(narrow, packed, 3, 0, narrow, True)
        plan.gather_rows(logits, queries)
    return plan


def ints(rng: random.Random, near: list[int]) -> np.ndarray:
    """The right array most of the time, else one with a wrong number, or of a wrong length."""
    values, kind = np.array(near, np.int32), rng.randrange(24)
    if kind == 0:
        return np.array(rng.choices(EXTREMES, k=rng.randrange(6)), np.int32)
    if kind == 1 and near:
        values[rng.randrange(len(near))] = rng.choice(EXTREMES)
    return values


def hostile_batch(rng: random.Random) -> tuple[Any, ...]:
    """The arguments of a run."""
    rows, context = rng.choice([(1, 0), (3, 2), (3, 61)])
    scheduled = rng.choice([rows, 1])
    near = [[1] * rows, list(range(context, context + rows)), [0, rows], [context], [scheduled]]
    kv = tuple((ints(rng, list(range(rows))), ints(rng, [0, 1]).reshape(1, -1)) for _ in range(rng.choice([2] * 20 + [0, 1, 3])))
    trees = [None, np.array([[0], [1], [3]][:rows], np.uint64), np.full((rows, 2), 2**64 - 1, np.uint64)]
    inputs = rng.choice([None] * 8 + [np.ones((rows, 32), np.float32), np.ones((1, 1), np.float32)])
    program = rng.choice([0] * 150 + [1, *EXTREMES])
    return *(ints(rng, values) for values in near), kv, rng.choice(trees), ints(rng, [rows - 1]), inputs, program


@settings(max_examples=200, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_any_calls_and_any_batch(data: st.DataObject, seed: int) -> None:
    plan, rng = furnished(data), random.Random(seed)
    for name, arguments in data.draw(st.lists(CALLS, max_size=30)):
        attempt(getattr(plan, name), *arguments)
    for _ in range(10):
        attempt(plan.run, *hostile_batch(rng))
        attempt(plan.move_slots, rng.randrange(-1, 3), ints(rng, [0]), ints(rng, [1]))


def test_most_batches_are_nearly_right() -> None:
    """So that more than the first check is tried."""
    plan, rng = furnished(None), random.Random(0)
    assert sum(attempt(plan.run, *hostile_batch(rng)) for _ in range(200)) > 25


@pytest.mark.parametrize(("rows", "cols"), [(0, 32), (-1, 32), (32, 0), (32, -32), (2**31 - 1, 2**31 - 32), (64, 32)])
def test_a_weight_has_the_shape_of_its_bytes(rows: int, cols: int) -> None:
    plan, codes = _native.Plan("", 1), np.zeros(32 * 34, np.uint8)
    assert not attempt(plan.add_weight, "Q8_0", rows, cols, codes, None)
    assert not attempt(plan.add_weight_pair, "Q8_0", codes, None, "Q8_0", codes, None, rows, cols)
    assert attempt(plan.add_weight, "Q8_0", 32, 32, codes, None)


def test_a_second_caller_gets_an_error() -> None:
    """And the first its answer: a plan runs one step at a time, and is not changed under it."""
    plan = _native.Plan("", 2)
    out, num_rows = plan.add_buffer(4096, False, False), 20_000
    plan.embed(out, plan.add_weight("F32", 1, 4096, np.ones(4096, np.float32).view(np.uint8), None))
    tokens, positions = np.zeros(num_rows, np.int32), np.arange(num_rows, dtype=np.int32)
    batch = (tokens, positions, *(np.array(one, np.int32) for one in ([0, num_rows], [0], [num_rows])), (), None, np.zeros(0, np.int32))
    expected = {"the plan is running a step: one at a time", "the plan is running a step, and cannot be changed meanwhile"}
    failures: set[str] = set()
    until = time.monotonic() + 60

    def run(*calls: Callable[[], Any]) -> None:
        while failures < expected and time.monotonic() < until:
            for call in calls:
                try:
                    call()
                except (RuntimeError, ValueError) as error:
                    failures.add(str(error))

    other = threading.Thread(target=run, args=(lambda: plan.run(*batch),))
    other.start()
    run(lambda: plan.run(*batch), lambda: plan.add_buffer(1, False, False))
    other.join()
    assert failures == expected
    plan.run(*batch)
    assert plan.floats(out, num_rows).min() == 1


FEW_THREADS = """
import resource
from headrace import _native
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (48 << 20), resource.RLIM_INFINITY))
for threads in (64, 1025):
    try:
        _native.Pool(threads)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__)
print(_native.Plan("", 2).threads)
"""


def test_threads_that_cannot_be_started() -> None:
    """Each needs 8 MB of addresses for its stack."""
    result = subprocess.run([sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["RuntimeError", "ValueError", "2"]
