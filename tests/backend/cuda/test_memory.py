"""Failing steps, from lack of memory or otherwise, and the memory reserved for steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backend import cuda
from headrace.backend.cuda import memory
from headrace.backend.cuda.architecture import B200, H100, L4, Architecture
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.step_memory import FIXED_BYTES
from headrace.backend.cuda.step_shape import StepShape
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine
from headrace.engine.thread import EngineThread, Inbox
from headrace.errors import ClosedError, DeviceLostError, MemoryLimitError
from headrace.loader.memory import step_rows
from headrace.logit_ops import SampleOp
from headrace.measure.gpu_memory import CUDA_CONTEXT_BYTES, gpu_runtime_bytes
from headrace.model import trace_model
from headrace.planner.machine_files import read_machine
from headrace.sampling_params import SamplingParams
from tests.backend.cuda.late import LateStream
from tests.backend.cuda.sampling_steps import Steps
from tests.backend.cuda.test_engine import (
    EXPERTS,
    LATENT,
    LLAMA,
    REQUESTS,
    WINDOWS,
    alone,
    late_engine,
)
from tests.backend.cuda.test_sampling_state import LOGITS, VOCAB, sampler, tokens_of
from tests.engine.test_promise import keeps_the_promise, model
from tests.tiny import run_all


def failing(engine: Engine, stage: str, at: set[int], error: Exception) -> list[int]:
    """Let a part of the launches with these numbers fail; returns the list that counts them."""
    executable, counted = engine._loop.executable, [0]
    whole: Callable[..., Any] = getattr(executable, stage)

    def fails(*args: Any) -> Any:
        counted[0] += 1
        if counted[0] in at:
            raise error
        return whole(*args)

    setattr(executable, stage, fails)
    return counted


@pytest.mark.parametrize("stage", ["_run", "_receive"])
def test_engine_survives_a_failed_launch(stage: str) -> None:
    """Tokens stay the same, also with penalties, although samplers took part in launches
    that are never read.
    """
    expected = alone(WINDOWS, "bf16", "int8")
    engine, _ = late_engine(WINDOWS, prepared=False, multi_step_ms=0)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
    counted = failing(engine, stage, {2, 5}, error)
    keeps_the_promise(engine, [0, 3], 1, expected, True, REQUESTS)
    assert counted[0] > 5 and engine.stats().failed_steps == 2


def test_failed_launch_changes_no_sampler_state() -> None:
    """The state of host and device is unchanged."""
    ours, theirs, steps = sampler(), sampler(), Steps(VOCAB)
    assert tokens_of(steps.run(LOGITS[:1], [SampleOp(0, 0, ours)])) == [
        theirs.draw(LOGITS[0], 0, -1)[0]
    ]
    in_flight = steps.launch(LOGITS, [SampleOp(1, 1, ours)])
    failed, _ = steps.launch(LOGITS, [SampleOp(2, 2, ours)])
    failed.cancel()
    assert steps.sampler.must_wait([SampleOp(0, 2, ours)])
    assert tokens_of(steps.read(in_flight)) == [theirs.draw(LOGITS[1], 1, -1)[0]]
    assert not steps.sampler.must_wait([SampleOp(0, 2, ours)])
    assert tokens_of(steps.run(LOGITS[:1], [SampleOp(0, 2, ours)])) == [
        theirs.draw(LOGITS[0], 2, -1)[0]
    ]
    np.testing.assert_array_equal(ours.seen(), theirs.seen())


def test_sampling_that_cannot_start_changes_no_state() -> None:
    ours, steps = sampler(), Steps(VOCAB)
    other = steps.launch(LOGITS, [SampleOp(0, 0, ours)])
    ours.append(3)
    fresh = sampler(1)
    with pytest.raises(RuntimeError):
        steps.sampler.begin([SampleOp(0, 0, fresh), SampleOp(1, 1, ours)])
    steps.read(other)
    assert not steps.sampler.must_wait([SampleOp(0, 0, fresh), SampleOp(1, 1, ours)])
    assert tokens_of(steps.run(LOGITS[:1], [SampleOp(0, 0, fresh)])) == [
        sampler(1).draw(LOGITS[0], 0, -1)[0]
    ]


def test_only_the_failing_request_ends() -> None:
    expected = alone(LLAMA, "bf16", "int8")
    engine, _ = late_engine(LLAMA, prepared=False, multi_step_ms=0)
    failing(
        engine,
        "_send",
        {2, 3},
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ..."),
    )
    results = run_all(engine, [REQUESTS[0], REQUESTS[3]])
    failed, whole = sorted(results, key=lambda result: result.error is None)
    assert isinstance(failed.error, MemoryLimitError)
    assert "the GPU is out of memory: CUDA out of memory" in str(failed.error)
    assert whole.error is None and [o.token_ids for o in whole.outputs] in [
        [o.token_ids for o in expected[i].outputs] for i in (0, 3)
    ]
    again = run_all(engine, [REQUESTS[3]])[0]
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in expected[3].outputs]


ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"


@pytest.mark.parametrize("stage", ["_send", "_run", "_receive"])
def test_a_lost_gpu_ends_the_engine(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is computed again, and callers read why."""
    monkeypatch.setattr(memory, "is_lost", lambda: True)
    engine, _ = late_engine(LLAMA, prepared=False, multi_step_ms=0)
    failing(engine, stage, {2}, torch.AcceleratorError(ILLEGAL))
    thread, inbox = EngineThread(engine), Inbox()
    thread.add([engine.check([1, 2, 3], SamplingParams(max_tokens=5))], ["a"], inbox)
    with pytest.raises(ClosedError, match="the GPU failed, and a new process must start: CUDA err"):
        while not inbox.get().result:
            pass
    assert thread.closed and engine.stats().failed_steps == 0


def test_a_gpu_lost_between_steps_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report or an adapter meets the error first; no request does."""
    engine, _ = late_engine(EXPERTS, prepared=False)

    def fails(*args: Any) -> Any:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(memory, "is_lost", lambda: True)
    monkeypatch.setattr(LateStream, "mark", fails)
    thread = EngineThread(engine)
    with pytest.raises(DeviceLostError, match="the GPU failed"):
        thread.call(engine.stats)
    with pytest.raises(ClosedError, match="the GPU failed, and a new process must start: CUDA err"):
        thread.call(engine.stats)


def test_every_call_reports_a_lost_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also calls between steps: reports, adapters, and KV blocks of the host."""
    engine, stream = late_engine(EXPERTS, prepared=False)
    executable = engine._loop.executable
    assert isinstance(executable, CudaExecutable)
    blocks = executable.host_blocks(1 << 20)
    assert blocks
    stream.catch_up()

    def fails(*args: Any) -> Any:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(memory, "is_lost", lambda: True)
    for name in ("copy", "copy_overlapped", "mark", "wait_for", "catch_up"):
        monkeypatch.setattr(LateStream, name, fails)
    none = np.zeros(0, np.int32)
    calls: dict[str, Callable[[], Any]] = {
        "expert_loads": executable.expert_loads,
        "add_adapter": lambda: executable.add_adapter({}),
        "remove_adapter": lambda: executable.remove_adapter(0),
        "move_slots": lambda: executable.move_slots(0, none, none),
        "save": lambda: blocks.save(0, 0, 0),
        "load": lambda: blocks.load(0, 0, 0),
    }
    for call in calls.values():
        with pytest.raises(DeviceLostError, match="the GPU failed, and a new process must start"):
            call()


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_memory_of_the_driver_may_run_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that does not fit ends its request alone."""
    monkeypatch.setattr(memory, "is_lost", lambda: True)
    engine, _ = late_engine(LLAMA, prepared=False, multi_step_ms=0)
    failing(engine, "_run", {1, 2}, error)
    failed = run_all(engine, [REQUESTS[0]])[0]
    assert isinstance(failed.error, MemoryLimitError)
    assert str(failed.error).startswith(f"the GPU is out of memory: {str(error).splitlines()[0]};")
    assert run_all(engine, [REQUESTS[0]])[0].error is None


def test_expert_loads_do_not_wait_for_the_device() -> None:
    engine, stream = late_engine(EXPERTS, prepared=False, multi_step_ms=0)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
    seen = []
    while engine.has_work:
        engine.step()
        waiting = len(stream._waiting)
        seen.append(int(np.sum(engine.stats().expert_loads)))
        assert len(stream._waiting) in (waiting, waiting + 1)  # with a copy
    total = int(np.sum(engine.stats().expert_loads))
    assert seen == sorted(seen) and 0 < seen[-1] <= total
    assert sum(engine.stats().expert_loads[0]) == 2 * (3 + 5)  # two experts of each row


def test_memory_error_of_weights_and_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tensors = model(LLAMA)
    program = trace_model(spec, tensors)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("headrace.backend.cuda.executable.CudaExecutable", full)
    weights = cuda.lower(program, tensors).weight_bytes
    with pytest.raises(
        MemoryLimitError,
        match=f"{weights:,} bytes of weights and .* bytes of KV do not fit on the GPU",
    ) as error:
        cuda.compile(program, tensors, KvConfig((8,) * len(program.kv_groups), 4), 1)
    assert error.value.__context__ is None  # which would hold what was made


@pytest.mark.parametrize("which", [LLAMA, WINDOWS, EXPERTS, LATENT])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_run_bytes_are_enough_for_the_largest_step(which: int, kv_dtype: Any) -> None:
    spec, tensors = model(which)
    program = trace_model(spec, tensors).with_pooled()
    kv = KvConfig((8,) * len(program.kv_groups), 64, kv_dtype)
    executable = cuda.compile(program, tensors, kv, 1)
    assert isinstance(executable, CudaExecutable)
    executable._plan(StepShape(512, 64, 0, False))
    aside = memory.run_bytes(executable.program, kv_dtype, 512, 64) - FIXED_BYTES
    assert executable._workspace.nbytes + executable._ints.nbytes < aside + FIXED_BYTES // 8
    assert aside < 2**26


@pytest.mark.parametrize("which", [LLAMA, WINDOWS, EXPERTS, LATENT])
@pytest.mark.parametrize("gpu, name", [(H100, "h100-sxm"), (L4, "l4"), (B200, "b200")])
def test_a_plan_counts_the_bytes_of_an_engine_on_a_gpu(
    which: int, gpu: Architecture, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, tensors = model(which)
    program = cuda.lower(trace_model(spec, tensors), tensors)
    monkeypatch.setattr("headrace.backend.cuda.step_attention.is_interpreting", lambda: False)
    monkeypatch.setattr("headrace.backend.cuda.step_attention.architecture", lambda: gpu)
    rows = step_rows(EngineConfig(backend="cuda"), spec.vocab_size)
    counted = gpu_runtime_bytes(program, read_machine(name).machine(), "bf16")
    assert counted - CUDA_CONTEXT_BYTES == memory.run_bytes(program, "bf16", *rows)


def test_free_memory() -> None:
    free = memory.free_memory()
    assert free is None if is_interpreting() else free > 0
