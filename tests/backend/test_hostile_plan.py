"""Invalid calls of a plan and invalid batches raise exceptions, and the process survives."""

import os
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
from tests.backend import hostile
from tests.backend.hostile import attempt


@settings(max_examples=100, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_random_plan_calls_and_batches_never_crash(rng: random.Random) -> None:
    """Calls of the builder come before, between and after batches."""
    plan = hostile.furnished(rng)
    for _ in range(rng.randrange(30)):
        hostile.build(rng, plan)
    for _ in range(10):
        attempt(plan.run, *hostile.batch(rng))
        if rng.randrange(3) == 0:
            hostile.build(rng, plan)


def test_random_plan_calls_are_mostly_valid() -> None:
    """So later checks are tested, too."""
    plan, rng = hostile.furnished(None), random.Random(0)
    assert sum(attempt(plan.run, *hostile.batch(rng)) for _ in range(200)) > 25
    for name, arguments in hostile.BUILDER.items():
        plan = hostile.furnished(None)
        assert attempt(plan.run, *hostile.right_batch(3, 2))
        assert any(attempt(getattr(plan, name), *arguments(rng)) for _ in range(300)), name


@pytest.mark.parametrize(
    ("rows", "cols"), [(0, 32), (-1, 32), (32, 0), (32, -32), (2**31 - 1, 2**31 - 32), (64, 32)]
)
def test_weight_shape_must_match_its_bytes(rows: int, cols: int) -> None:
    plan, codes = _native.Plan("", 1), np.zeros(32 * 34, np.uint8)
    assert not attempt(plan.add_weight, "Q8_0", rows, cols, codes, None)
    assert not attempt(plan.add_weight_pair, "Q8_0", codes, None, "Q8_0", codes, None, rows, cols)
    assert attempt(plan.add_weight, "Q8_0", 32, 32, codes, None)


def test_concurrent_plan_calls_raise() -> None:
    """The first caller gets its result: a plan runs one step at a time and does not change during
    it.
    """
    plan = _native.Plan("", 2)
    out, num_rows = plan.add_buffer(4096, "step", False), 20_000
    plan.embed(out, plan.add_weight("F32", 1, 4096, np.ones(4096, np.float32).view(np.uint8), None))
    tokens, positions = np.zeros(num_rows, np.int32), np.arange(num_rows, dtype=np.int32)
    batch = (
        tokens,
        positions,
        *(np.array(one, np.int32) for one in ([0, num_rows], [0], [num_rows])),
        (),
        None,
        np.zeros(0, np.int32),
    )
    expected = {
        "the plan is at work in another thread: one at a time",
        "the plan is at work in another thread, and cannot be read or changed meanwhile",
    }
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
    run(lambda: plan.run(*batch), lambda: plan.add_buffer(1, "step", False))
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


def test_threads_that_cannot_start() -> None:
    """Each thread needs 8 MB of address space for its stack."""
    assert limited(FEW_THREADS) == ["RuntimeError", "ValueError", "2"]


def limited(code: str) -> list[str]:
    """The output of a program with limited memory; sanitizers are switched off, since they need
    more.
    """
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


NO_MEMORY = """
import gc, resource
import numpy as np
from headrace import _native

def limit(more):
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + more if more else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def arrays(num_rows):
    i32 = lambda values: np.array(values, np.int32)
    return i32([0] * num_rows), i32(range(num_rows)), i32([0, num_rows]), i32([0]), i32([num_rows]), (), None, i32([])

WIDTH = 1 << 22
plan = _native.Plan("", 2)
rows, packed = plan.add_buffer(WIDTH, "step", False), plan.add_buffer(WIDTH, "step", True)
plan.embed(rows, plan.add_weight("F32", 1, WIDTH, np.ones(WIDTH, np.float32).view(np.uint8), None))
program = plan.add_program()
plan.norm(packed, rows, plan.add_vector(np.ones(WIDTH, np.float32)), -1, "rms", WIDTH, 1e-5)
plan.run(*arrays(32))
before = plan.floats(rows, 32)
plan.run(*arrays(1), program=program)  # the caller's thread has its memory now, and the other none
limit(8 << 20)
for attempt in range(50):  # unless the caller does all of it by itself
    try:
        plan.run(*arrays(32), program=program)
    except MemoryError:
        print("worker")
        break
limit(0)
plan.run(*arrays(32), program=program)
limit(64 << 20)
try:
    plan.run(*arrays(100))  # the buffers cannot grow
except MemoryError:
    print("growth")
try:
    plan.floats(rows, 1)
except ValueError:
    print("none")
limit(0)
plan.run(*arrays(3))
print(int(before.min()), int(before.max()), int(plan.floats(rows, 3).sum()) == 3 * WIDTH)
"""  # noqa: E501


def test_out_of_memory_in_threads_and_buffers() -> None:
    """Python gets the exception, the plan works again with more memory, and old views stay
    valid.
    """
    assert limited(NO_MEMORY) == ["worker", "growth", "none", "1", "1", "True"]


def one_row(*tokens: int) -> tuple[Any, ...]:
    arrays = (
        np.array(values, np.int32)
        for values in (tokens, range(len(tokens)), [0, len(tokens)], [0], [len(tokens)])
    )
    return *arrays, (), None, np.zeros(0, np.int32)


def test_ops_added_after_a_run() -> None:
    """The next run allocates their buffers, although the old buffers have enough rows."""
    plan = _native.Plan("", 1)
    rows = plan.add_buffer(32, "step", False)
    plan.embed(rows, plan.add_weight("F32", 1, 32, np.ones(32, np.float32).view(np.uint8), None))
    plan.run(*one_row(0, 0))
    out, packed = plan.add_buffer(32, "step", False), plan.add_buffer(32, "step", True)
    weight = plan.add_weight("F32", 32, 32, np.ones(1024, np.float32).view(np.uint8), None)
    plan.pack(packed, rows)
    plan.linear(out, packed, weight, -1, -1, False)
    plan.run(*one_row(0))
    assert plan.floats(out, 1).tolist() == [[32.0] * 32]
    quantised = plan.add_weight("Q8_0", 32, 32, np.zeros(32 * 34, np.uint8), None)
    plan.run(*one_row(0))
    assert not attempt(
        plan.linear, rows, packed, quantised, 5, -1, False
    )  # refused for its bias, but it has asked for int8 rows
    plan.run(*one_row(0))


def test_a_step_with_too_many_rows() -> None:
    """The product of blocks and items overflows an int."""
    plan, num_rows = _native.Plan("portable", 1), 600_000
    rows, packed, out = (
        plan.add_buffer(1, "step", False),
        plan.add_buffer(1, "step", True),
        plan.add_buffer(1, "step", False),
    )
    weight = plan.add_weight("F32", 1, 1, np.ones(1, np.float32).view(np.uint8), None)
    plan.embed(rows, weight)
    plan.pack(packed, rows)
    plan.linear(out, packed, weight, -1, -1, False)
    plan.run(*one_row(*[0] * num_rows))
    assert plan.floats(out, num_rows).min() == 1
    assert not attempt(plan.run, *one_row(*[0] * (2**24 + 1)))


@pytest.mark.parametrize(("call", "arguments"), [
    ("add_kv_group", (2**31 - 1, 2**20, 16, 16, 0, 2**25, "f32")),
    ("reserve_weights", (2**64 - 1,)),
    ("reserve_weights", (2**63,)),
])  # fmt: skip
def test_overflowing_sizes_are_refused(call: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MemoryError):
        getattr(_native.Plan("", 1), call)(*arguments)


def test_overflowing_measurements_are_refused() -> None:
    for nbytes in (2**64 - 1, 2**63, 2**46):
        with pytest.raises(MemoryError):
            _native.read_bandwidth(1, nbytes)
    for function, arguments in (
        (_native.read_bandwidth, (2, 8191)),
        (_native.read_bandwidth, (1025, 2**30)),
        (_native.dot_rate, ("f32", 1025)),
    ):
        with pytest.raises(ValueError):
            function(*arguments)
    for n in (-1, 0, 2**31 - 1):
        assert not attempt(_native.vector_bytes, n) and not attempt(
            _native.kv_block_bytes, "f32", n, 16
        )
        assert not attempt(_native.packed_bytes, "F32", n, 32) and not attempt(
            _native.packed_bytes, "F32", 32, n
        )


def test_refused_weights_take_no_memory() -> None:
    plan = _native.Plan("", 1)
    assert not attempt(plan.add_weight, "F32", 32, 32, np.zeros(7, np.uint8), None)
    assert plan.weight_bytes == 0


def test_native_objects_cannot_be_initialised_twice() -> None:
    plan = _native.Plan("", 1)
    for make in (lambda: plan.__init__("", 2), lambda: _native.Plan.__new__(_native.Plan).threads):
        with pytest.warns(RuntimeWarning), pytest.raises((TypeError, RuntimeError)):
            make()
    assert plan.threads == 1


def test_arrays_changed_by_another_thread() -> None:
    """A step runs with the numbers that were checked; token 2^30 would be far outside the
    weight.
    """
    plan = _native.Plan("", 2)
    out = plan.add_buffer(64, "step", False)
    plan.embed(out, plan.add_weight("F32", 1, 64, np.ones(64, np.float32).view(np.uint8), None))
    batch = one_row(*[0] * 4000)
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            batch[0][:] = 2**30
            batch[0][:] = 0

    other = threading.Thread(target=change)
    other.start()
    try:
        for _ in range(300):
            if attempt(plan.run, *batch):
                assert plan.floats(out, 4000).min() == 1
    finally:
        ended.set()
        other.join()
    batch[0][:] = 0
    assert attempt(plan.run, *batch) and plan.floats(out, 4000).min() == 1


def test_packing_releases_the_gil() -> None:
    """Another thread continues meanwhile, and gets an error from the plan."""
    plan, codes, scales = (
        _native.Plan("", 1),
        np.zeros(1 << 24, np.uint8),
        np.ones(1 << 12, np.float32),
    )
    until, errors = time.monotonic() + 60, set()

    def look() -> None:
        while not errors and time.monotonic() < until:
            try:
                plan.floats(0, 0)
            except ValueError as error:
                errors.update({str(error)} - {"a plan has no such buffer"})

    other = threading.Thread(target=look)
    other.start()
    while not errors and time.monotonic() < until:
        plan = _native.Plan("", 1)
        plan.add_weight("I8_ROW", 1 << 12, 1 << 12, codes, None, scales)
    other.join()
    assert errors == {
        "the plan is at work in another thread, and cannot be read or changed meanwhile"
    }
