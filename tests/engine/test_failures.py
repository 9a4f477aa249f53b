"""Errors in the middle of a step: only the culprit's request fails, the others get their tokens,
and no block leaks.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from headrace.batch import RaggedBatch
from headrace.engine import resolve
from headrace.engine import step as step_module
from headrace.engine.deadlines import Deadlines
from headrace.engine.engine import Engine
from headrace.engine.in_flight import InFlightStep
from headrace.engine.scheduled import ScheduledSequence
from headrace.outputs import RequestOutput
from headrace.request import Pooling, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from tests.engine.toy import plain_decoding, toy_engine, toy_vector
from tests.tiny import drain

SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=9)
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([1, 2, 3, 4, 5], SAMPLED),
    ([1, 2, 3, 4, 9, 9], SamplingParams(n=3, seed=1, max_tokens=7, logprobs=1)),
    ([7, 8], SamplingParams(beam_width=2, max_tokens=6)),
    ([2] * 11, SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1)),
    ([3, 1, 4], SAMPLED),
]


class Fault:
    """Raises an error in the `at`-th call of the functions that it wraps."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left = at
        self.error = error

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: self._strike() or function(*args, **options)

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            value = function(*args, **options)
            self._strike()
            return value

        return call

    def _strike(self) -> None:
        self.left -= 1
        if not self.left:
            raise self.error


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    results: dict[str, RequestOutput] = {}
    for _ in range(500):
        for update in engine.step() if engine.has_work else ():
            if update.result:
                assert update.request_id not in results, "a request ended twice"
                results[update.request_id] = update.result
    assert not engine.has_work
    return [results[request_id] for request_id in ids]


def is_whole(engine: Engine) -> bool:
    """Whether all blocks are free, and the engine still works."""
    engine._kv.check([])
    scheduler = engine._scheduler
    assert (
        not scheduler.running
        and not scheduler.waiting
        and not scheduler._dropped
        and not engine._requests
    )
    assert not engine._deadlines._heap[16:]
    (result,) = run(engine, [([5, 6, 7, 8, 9], SAMPLED)])
    engine._kv.check([])
    return [5, 6, 7, 8, 9, *result.outputs[0].token_ids] == plain_decoding(
        [5, 6, 7, 8, 9], SAMPLED, 0
    )


PLACES: dict[str, Callable[[Engine, Fault], tuple[Any, str]]] = {
    "launch": lambda engine, fault: (engine._loop.executable, "launch"),
    "move_slots": lambda engine, fault: (engine._loop.executable, "move_slots"),
    "schedule": lambda engine, fault: (engine._scheduler, "schedule"),
    "start": lambda engine, fault: (engine._scheduler, "_start"),
    "preempt": lambda engine, fault: (engine._scheduler, "_preempt"),
    "fork": lambda engine, fault: (engine._scheduler, "fork"),
    "replace": lambda engine, fault: (engine._scheduler, "replace_sequences"),
    "drop": lambda engine, fault: (engine._scheduler, "drop"),
    "free": lambda engine, fault: (engine._scheduler, "_free"),
    "allocate": lambda engine, fault: (engine._kv, "allocate"),
    "trim": lambda engine, fault: (engine._kv, "trim"),
    "insert": lambda engine, fault: (engine._scheduler._cache, "insert"),
    "plan": lambda engine, fault: (engine._speculation, "plan"),
    "observe": lambda engine, fault: (engine._speculation, "observe"),
    "build": lambda engine, fault: (step_module, "build_batch"),
    "draws": lambda engine, fault: (step_module, "prepare_logit_ops"),
    "resolve": lambda engine, fault: (step_module, "resolve_step"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("late", [False, True])
def test_a_step_may_fail_at_any_point(
    place: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [answer(result) for result in run(toy_engine(), REQUESTS)]
    struck = 0
    for at in (1, 2, 3, 5, 9, 17):
        for side in ("before", "after"):
            with monkeypatch.context() as patch:
                engine = toy_engine(
                    num_blocks=11,
                    late=late,
                    max_num_seqs=6,
                    multi_step_ms=5,
                    proposer={} if late else None,
                )
                fault = Fault(at, MemoryError("no more memory"))
                owner, name = PLACES[place](engine, fault)
                patch.setattr(owner, name, getattr(fault, side)(getattr(owner, name)))
                results = run(engine, REQUESTS)
                assert [answer(result) for result in results] == expected
                assert engine.stats().failed_steps == (fault.left <= 0)
                struck += fault.left <= 0
            assert is_whole(engine)
    assert struck or place in ("move_slots", "preempt", "trim")  # which are rare


def answer(result: RequestOutput) -> object:
    return result.error, result.finished, result.outputs, result.prompt_logprobs


@pytest.mark.parametrize("place", ["build", "draws", "draft", "find", "launch"])
@pytest.mark.parametrize("batching", ["inflight", "static"])
def test_the_culprit_of_a_failed_step_ends_alone(
    place: str, batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is the culprit once, from its first token on or later. The other requests get
    the same tokens.
    """
    expected = run(toy_engine(), REQUESTS)
    for culprit, (_, params) in enumerate(REQUESTS):
        for num_tokens in (0, 3):
            with monkeypatch.context() as patch:
                engine = toy_engine(
                    num_blocks=14,
                    max_num_seqs=6,
                    batching=batching,
                    late=place == "launch" and batching == "inflight",
                )
                error = ArithmeticError("this one")
                owners = {
                    "build": (step_module, "build_batch"),
                    "draws": (step_module, "prepare_logit_ops"),
                }
                owners |= {
                    "draft": (engine._speculation, "plan"),
                    "find": (engine._loop.jump_forward, "find"),
                }
                owner, name = owners.get(place, (engine._loop.multi_step, "plan"))
                patch.setattr(
                    owner, name, failing_of(culprit, num_tokens, error, getattr(owner, name))
                )
                results = run(engine, REQUESTS)
            failed = results.pop(culprit)
            assert failed.error is error and {
                output.finish_reason for output in failed.outputs
            } == {"error"}
            said = [output.token_ids for output in failed.outputs]
            wholes = [output.token_ids for output in expected[culprit].outputs]
            if params.beam_width is None:
                assert all(
                    tokens == whole[: len(tokens)]
                    for tokens, whole in zip(said, wholes, strict=True)
                )
                assert all(len(tokens) >= num_tokens for tokens in said)
            assert [answer(result) for result in results] == [
                answer(result) for i, result in enumerate(expected) if i != culprit
            ]
            assert is_whole(engine)


def failing_of(
    culprit: int, num_tokens: int, error: Exception, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function of a step, which fails if the culprit has `num_tokens` tokens in the step."""

    def call(step: InFlightStep | list[ScheduledSequence], *args: Any, **options: Any) -> Any:
        scheduled = step.scheduled if isinstance(step, InFlightStep) else step
        if any(
            item.seq.request.number == culprit and len(item.seq.output.token_ids) >= num_tokens
            for item in scheduled
        ):
            raise error
        return function(step, *args, **options)

    return call


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_restarts_after_a_failed_step(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second chunk of the prompt fails after its launch, so its rows have been pooled
    already.
    """
    engine, prompt = toy_engine(max_num_batched_tokens=4), list(range(1, 12))
    launch = engine._loop.executable.launch
    monkeypatch.setattr(
        engine._loop.executable,
        "launch",
        Fault(2, RuntimeError("the device is lost")).after(launch),
    )
    engine.add(engine.check(prompt, pooling=PoolingParams(pooling=pooling)))
    result = drain(engine)[-1].result
    assert engine.stats().failed_steps == 1
    assert (
        result is not None
        and result.error is None
        and np.array_equal(result.embedding, toy_vector(prompt, pooling))
    )  # type: ignore[arg-type]


def test_suspects_run_one_by_one_and_then_together(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = toy_engine(max_num_seqs=4), list[int]()
    launch = engine._loop.executable.launch

    def watched(batch: RaggedBatch, *args: Any, **options: Any) -> Any:
        sizes.append(len(batch.scheduled_len))
        if len(sizes) == 3:
            raise RuntimeError("the device is lost")
        return launch(batch, *args, **options)

    monkeypatch.setattr(engine._loop.executable, "launch", watched)
    results = run(engine, [([i, 2, 3], SAMPLED) for i in range(5)])
    assert sizes[:9] == [4, 4, 4, 1, 1, 1, 1, 4, 4]
    tokens = [[i, 2, 3, *result.outputs[0].token_ids] for i, result in enumerate(results)]
    assert tokens == [plain_decoding([i, 2, 3], SAMPLED, 0) for i in range(5)]
    assert not engine._scheduler.suspects and is_whole(engine)


def test_a_request_whose_admission_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching its prefix fails while no request runs; later requests in the queue continue."""
    engine = toy_engine(max_num_seqs=1)
    match = engine._scheduler._match_prefix
    monkeypatch.setattr(
        engine._scheduler,
        "_match_prefix",
        lambda seq: 1 / 0 if seq.request.number == 1 else match(seq),
    )
    results = run(engine, [([i, 2, 3], SAMPLED) for i in range(3)])
    assert [type(result.error) for result in results] == [type(None), ZeroDivisionError, type(None)]
    assert engine.stats().failed_steps == 2 and is_whole(engine)


def test_a_stored_error_keeps_no_sequence_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft model frees its KV of a sequence with the sequence."""
    engine = toy_engine()
    engine.add_request([1, 2, 3], SAMPLED)
    (seq,) = engine._scheduler.waiting
    old = weakref.ref(seq)
    del seq
    fault = Fault(1, RuntimeError("the device is lost"))
    monkeypatch.setattr(
        engine._loop.executable, "launch", fault.before(engine._loop.executable.launch)
    )
    engine.step()
    assert (
        caplog.records[0].exc_info
        and caplog.records[0].exc_info[1] is fault.error
        and old() is None
    )
    drain(engine)
    assert is_whole(engine)


def test_a_suspect_that_is_aborted_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    fault = Fault(1, RuntimeError("the device is lost"))
    monkeypatch.setattr(
        engine._loop.executable, "launch", fault.before(engine._loop.executable.launch)
    )
    ids = [engine.add_request([i, 2, 3], SAMPLED) for i in range(2)]
    engine.step()
    assert len(engine._scheduler.suspects) == 2
    engine.abort(ids[0])
    drain(engine)
    assert not engine._scheduler.suspects and is_whole(engine)


def test_the_prefix_cache_is_empty_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(block_size=4)
    prompt = list(range(10))
    assert [run(engine, [(prompt, SAMPLED)])[0].cached_tokens for _ in range(2)] == [0, 8]
    assert engine.stats().blocks_cached
    monkeypatch.setattr(
        engine._loop.executable,
        "launch",
        Fault(1, RuntimeError()).before(engine._loop.executable.launch),
    )
    engine.add_request(prompt, SAMPLED)
    engine.step()
    assert engine.stats().blocks_cached == 0
    assert [update.result.error for update in drain(engine) if update.result] == [None]


def test_a_step_that_always_fails_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(max_num_seqs=2)
    monkeypatch.setattr(
        engine._loop.executable,
        "launch",
        Fault(1, OSError("gone")).after(lambda *args, **options: 1 / 0),
    )
    assert [type(result.error) for result in run(engine, REQUESTS)] == [ZeroDivisionError] * len(
        REQUESTS
    )
    engine._kv.check([])


class TestTokenizer:
    """An error of the tokenizer fails only the request that it decodes for."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        engine = toy_engine()
        yield engine
        engine._kv.check([])
        engine.close()

    @pytest.mark.parametrize(
        "params",
        [
            SAMPLED,
            SamplingParams(seed=3, max_tokens=9, logprobs=1),
            SamplingParams(seed=3, n=2, max_tokens=9),
        ],
    )
    def test_tokenizer_error_while_decoding(self, engine: Engine, params: SamplingParams) -> None:
        good = SamplingParams(seed=3, max_tokens=9)
        whole = run(engine, [([1, 2, 3], good)])[0]
        first, second = (engine.add_request([1, 2, 3], each) for each in (params, good))
        engine.step()
        for seq in engine._requests[first].seqs:
            seq.output._decoder.push = self.fails  # type: ignore[method-assign]
        results = {update.request_id: update.result for update in drain(engine) if update.result}
        failed = results[first]
        assert failed is not None and isinstance(failed.error, KeyError)
        assert {output.finish_reason for output in failed.outputs} == {"error"}
        assert results[second] is not None and results[second].outputs == whole.outputs  # type: ignore[union-attr]

    def test_tokenizer_error_ends_one_sequence_alone(self, engine: Engine) -> None:
        """What its siblings are does not depend on the step in which it fails."""
        request_id = engine.add_request([1, 2, 3], SamplingParams(seed=3, n=2, max_tokens=9))
        engine.step()
        engine._requests[request_id].seqs[0].output._decoder.push = self.fails  # type: ignore[method-assign]
        result = drain(engine)[-1].result
        assert result is not None and isinstance(result.error, KeyError)
        assert [output.finish_reason for output in result.outputs] == ["error", "length"]
        assert len(result.outputs[1].token_ids) == 9

    @pytest.mark.parametrize("reason", ["length", "abort", "timeout"])
    def test_tokenizer_error_at_the_end(self, reason: str) -> None:
        now = [0.0]
        engine = toy_engine(clock=lambda: now[0])
        request_id = engine.add_request(
            [1, 2, 3],
            SamplingParams(seed=3, max_tokens=2 if reason == "length" else 20),
            options=RequestOptions(timeout=5),
        )
        engine.step()
        engine._requests[request_id].seqs[0].output._decoder.flush = self.fails  # type: ignore[method-assign]
        if reason == "abort":
            result = engine.abort(request_id)
        else:
            now[0] = 9.0 if reason == "timeout" else 0.0
            result = drain(engine)[-1].result
        assert (
            result is not None
            and isinstance(result.error, KeyError)
            and result.outputs[0].finish_reason == "error"
        )
        assert is_whole(engine)

    def test_tokenizer_error_in_prompt_logprobs(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resolve, "describe", self.fails)
        params = SamplingParams(temperature=0, max_tokens=9)
        failed, good = run(
            engine, [([1, 2, 3], SamplingParams(prompt_logprobs=1)), ([4, 5], params)]
        )
        assert isinstance(failed.error, KeyError) and failed.outputs[0].finish_reason == "error"
        assert [4, 5, *good.outputs[0].token_ids] == plain_decoding([4, 5], params, 0)

    def fails(self, *args: Any) -> Any:
        raise KeyError("no such token")


def test_closing_after_a_failed_step() -> None:
    engine = toy_engine(late=True)
    engine.add_request([1, 2, 3], SAMPLED)
    engine.step()
    engine._loop.executable.inner.forward = lambda batch: 1 / 0  # type: ignore[attr-defined]
    engine.close()
    assert engine._loop.executable.inner.closed  # type: ignore[attr-defined]


def test_a_request_ends_at_its_deadline() -> None:
    now = [3.0]
    engine = toy_engine(clock=lambda: now[0])
    engine.add_request([1, 2], SamplingParams(max_tokens=20), options=RequestOptions(timeout=2))
    for now[0], ended in ((4.9, 0), (5.0, 1)):
        assert sum(update.finish_reason == "timeout" for update in engine.step()) == ended


def test_a_request_ends_after_the_queue_timeout() -> None:
    """The timeout does not apply to a request that has started, even if it was preempted."""
    now = [3.0]
    engine = toy_engine(clock=lambda: now[0], max_num_seqs=1, queue_timeout=2.0)
    first, second = engine.add_request([1, 2], SAMPLED), engine.add_request([3, 4], SAMPLED)
    updates = engine.step()
    now[0] = 4.9
    updates += engine.step()
    assert {update.request_id for update in updates} == {first}
    now[0] = 5.0
    ended = [update for update in engine.step() if update.finish_reason]
    assert [(update.request_id, update.finish_reason, update.token_ids) for update in ended] == [
        (second, "timeout", [])
    ]
    assert [update.finish_reason for update in drain(engine) if update.result] == ["length"]
    assert not engine._queue_deadlines and is_whole(engine)


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    engine = toy_engine()
    for _ in range(100):
        engine.add_request(
            [1, 2], SamplingParams(max_tokens=1), options=RequestOptions(timeout=1e6)
        )
        drain(engine)
    assert len(engine._deadlines._heap) <= 17 and not engine._deadlines
    ids = [
        engine.add_request([1, 2], SAMPLED, options=RequestOptions(timeout=1e6)) for _ in range(50)
    ]
    for request_id in ids[:-1]:
        engine.abort(request_id)
    assert len(engine._deadlines) == 1 and len(engine._deadlines._heap) <= 18


def test_deadlines_of_ended_requests_are_swept() -> None:
    """The heap is swept once it has sixteen entries more than twice the live ones; the order
    stays.
    """
    engine, deadlines = toy_engine(), Deadlines()
    ids = [engine.add_request([1]) for _ in range(40)]
    times = {engine._requests[request_id]: 17 * i % 40 for i, request_id in enumerate(ids)}
    for request, time in times.items():
        deadlines.add(time, request)
    *ended, last = list(times)[:29]
    for request in ended:
        deadlines.discard(request)
    assert (len(deadlines), len(deadlines._heap)) == (12, 40)
    deadlines.discard(last)
    assert (len(deadlines), len(deadlines._heap)) == (11, 11)
    left = sorted(list(times)[29:], key=times.__getitem__)
    assert [deadlines.pop_overdue(times[request]) for request in left] == [
        [request] for request in left
    ]
    assert not deadlines and not deadlines._heap


def test_the_cost_of_a_request_does_not_grow_with_the_queue() -> None:
    """Dropping a sequence compares its rank with a logarithmic number of others."""
    engine = toy_engine(max_num_seqs=4, num_blocks=64)
    for _ in range(2000):
        engine.add_request([1, 2], SamplingParams(max_tokens=1))
    looked = 0

    class Watched(type(engine._scheduler.waiting[0])):  # type: ignore[misc]
        def __eq__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return self is other

        __hash__ = object.__hash__

        @property
        def rank(self) -> tuple[int, int, int]:
            nonlocal looked
            looked += 1
            return super().rank  # type: ignore[no-any-return]

    for seq in engine._scheduler.waiting:
        seq.__class__ = Watched
    for request_id in list(engine._requests)[1::2]:
        engine.abort(request_id)
    assert looked <= 1000 * 12
    looked = 0
    assert len(drain(engine)) == 1000
    assert looked <= 1000 * 40
