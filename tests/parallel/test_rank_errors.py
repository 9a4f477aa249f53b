"""Errors on ranks that live end one request; commands survive the loss of a rank."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.batch import RaggedBatch
from headrace.errors import RankFailedError, RankLostError, RequestFailedError
from headrace.outputs import RequestOutput
from headrace.parallel import workers
from headrace.parallel.commands import (
    Command,
    CommandKind,
    adapter_to_arrays,
    batch_from_arrays,
    batch_to_arrays,
)
from headrace.parallel.cpu_rank import CpuRank
from headrace.parallel.executable import ParallelExecutable
from headrace.parallel.launch import LocalProcess
from headrace.program.adapter import LowRank
from headrace.remote.errors import RefusedError
from headrace.remote.host import refused_event
from headrace.server.errors import as_api_error
from tests.parallel.test_processes import children, is_running, save_with_tokenizer
from tests.test_adapters import write_adapter

POISON = 99
PROMPTS = [[5, 6, 7] * 9, [POISON, 4, 8] * 7, [9, 8, 7] * 5]
SIZES: dict[str, Any] = {"threads": 1, "kv_blocks": 16, "max_num_batched_tokens": 16}


def generate(
    llm: LLM, prompts: list[list[int]] = PROMPTS, adapter: str | None = None
) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    try:
        return llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, adapter=adapter
        )
    except RequestFailedError as error:
        return error.outputs


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for number in range(2):
        write_adapter(folder / f"adapter-{number}", 4 + number, layers=(0, 1), heads=64, dim=64)
    return save_with_tokenizer("mixtral", folder / "mixtral")


@pytest.fixture(scope="module", autouse=True)
def instructions() -> Iterator[None]:
    """Ranks use the instruction set of HEADRACE_ISA, as one rank does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_ISA", "portable")
        yield


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str | None, list[Any]]:
    with LLM(model, **SIZES) as llm:
        for number in range(2):
            llm.load_adapter(str(number), model.with_name(f"adapter-{number}"))
        by_adapter = {name: results(generate(llm, adapter=name)) for name in (None, "0", "1")}
    assert len({str(result) for result in by_adapter.values()}) == 3
    return by_adapter


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[LLM]:
    with LLM(model, tensor_parallel_size=2, pipeline_parallel_size=2, **SIZES) as llm:
        assert executable_of(llm)._rank.identity.startswith("instructions portable, ")
        yield llm


def executable_of(llm: LLM) -> ParallelExecutable:
    executable = llm._engine._loop.executable
    assert isinstance(executable, ParallelExecutable)
    return executable


Fault = Callable[[ParallelExecutable, pytest.MonkeyPatch, dict[str, bool]], None]


def rank_0_fails(
    executable: ParallelExecutable, patch: pytest.MonkeyPatch, fails: dict[str, bool]
) -> None:
    rank = executable._rank
    assert isinstance(rank, CpuRank)
    rows = rank.rows

    def failing(number: int, batch: RaggedBatch) -> Any:
        if POISON in batch.tokens:
            raise ValueError("an error of rank 0")
        return rows(number, batch)

    patch.setattr(rank, "rows", failing)


def rank_0_fails_within_an_exchange(
    executable: ParallelExecutable, patch: pytest.MonkeyPatch, fails: dict[str, bool]
) -> None:
    rank = executable._rank
    assert isinstance(rank, CpuRank)
    collectives, transport = rank._collectives, rank._collectives._transport
    gather, calls = transport.all_gather, [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if POISON in collectives._tokens and calls[0] % 5 == 0:
            raise MemoryError
        return gather(*args)

    patch.setattr(transport, "all_gather", failing)


def another_rank_fails(
    executable: ParallelExecutable, patch: pytest.MonkeyPatch, fails: dict[str, bool]
) -> None:
    """The other ranks get an adapter number that they do not have."""
    send = executable._workers.send

    def sending(command: Command) -> None:
        if command.kind == CommandKind.RUN and fails["now"]:
            batch = batch_from_arrays(command.arrays)
            batch = batch._replace(adapters=batch.context_len * 0 + 77)
            command = command._replace(arrays=batch_to_arrays(batch))
        send(command)

    patch.setattr(executable._workers, "send", sending)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (rank_0_fails, ValueError),
        (rank_0_fails_within_an_exchange, MemoryError),
        (another_rank_fails, RankFailedError),
    ],
)
def test_error_of_a_rank_ends_one_request(
    ranks: LLM,
    expected: dict[str | None, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    error: type[Exception],
) -> None:
    """More often than ranks may restart; the processes stay."""
    executable, before, fails = executable_of(ranks), children(), {"now": False}
    launch = executable.launch

    def launching(batch: Any, *args: Any, **options: Any) -> Any:
        fails["now"] = POISON in batch.tokens
        return launch(batch, *args, **options)

    monkeypatch.setattr(executable, "launch", launching)
    fault(executable, monkeypatch, fails)
    for _ in range(workers._MAX_RESTARTS + 1):
        first, poisoned, last = generate(ranks)
        assert isinstance(poisoned.error, error)
        assert results([first, last]) == [expected[None][0], expected[None][2]]
    monkeypatch.undo()
    assert results(generate(ranks)) == expected[None]
    assert children() == before


def test_adapter_that_another_rank_cannot_hold(ranks: LLM, model: Path) -> None:
    executable, before = executable_of(ranks), children()
    matrix = np.ones((3, 5), np.float32)  # of no weight's shape
    bad = adapter_to_arrays({"layers.0.q": LowRank(matrix, matrix, 1.0)})
    for _ in range(2):
        with pytest.raises(RankFailedError, match=r"rank 2: \w+"):
            executable._workers.add_adapter(0, bad)
    assert not executable._workers.adapter_bytes
    ranks.load_adapter("0", model.with_name("adapter-0"))
    assert executable._workers.adapter_bytes > 0
    ranks.unload_adapter("0")
    assert not executable._workers.adapter_bytes and children() == before


class _LateWatcher:
    """Keeps rank 0 from noticing the end of a process until `seen`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen = Event()
        end_reason = LocalProcess.end_reason

        def late(process: LocalProcess, seconds: float) -> str:
            self.seen.wait(20)
            return end_reason(process, seconds)

        patch.setattr(LocalProcess, "end_reason", late)

    def kill_rank(self) -> None:
        pid = children()[0]
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            time.sleep(0.01)


def test_commands_at_the_moment_of_a_loss(
    ranks: LLM,
    model: Path,
    expected: dict[str | None, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An adapter goes with its last request, and others are loaded and unloaded."""
    engine, kept = ranks._engine, executable_of(ranks)._workers
    watcher, forget, is_lost = _LateWatcher(monkeypatch), engine._forget, list[bool]()

    def forgetting(request_id: str) -> None:
        if not is_lost:
            is_lost.append(True)
            watcher.kill_rank()
        forget(request_id)

    def load(name: str) -> None:
        ranks.load_adapter(name, model.with_name(f"adapter-{name}"))

    load("0")
    monkeypatch.setattr(engine, "_forget", forgetting)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, ranks, PROMPTS[:1], adapter="0")
        while not ranks.stats().running:
            assert not running.done()
        ranks.unload_adapter("0")
        assert results(running.result()) == expected["0"][:1]
    assert is_lost and not kept.adapter_bytes

    load("1")
    load("0")
    ranks.unload_adapter("1")
    load("1")
    watcher.seen.set()
    for name in (None, "0", "1"):
        assert results(generate(ranks, adapter=name)) == expected[name]
    assert len(kept._adapters) == 2


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RankLostError("rank 1 ended"), 503, "rank_lost"),
        (RankFailedError("rank 1: MemoryError"), 500, "internal_error"),
        (MemoryError(), 500, "internal_error"),
    ],
)
def test_errors_of_ranks_at_the_server(error: Exception, status: int, code: str) -> None:
    """They are no errors of the client."""
    refused = refused_event("1", error)
    found = as_api_error(RefusedError(refused.kind, refused.message))
    assert (found.status, found.code) == (status, code)
