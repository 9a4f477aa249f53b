"""Multi-step decoding: the number of launches in a row, and the same tokens."""

from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.batch import NO_DRAFT, Commit, DraftTree, RaggedBatch
from headrace.engine.engine import Engine
from headrace.logit_ops import StepResult
from headrace.outputs import RequestOutput
from headrace.proposer import ProposerTraits
from headrace.sampling_params import SamplingParams
from tests.engine.test_promise import same
from tests.engine.toy import ToyExecutable, plain_decoding, toy_engine
from tests.random_trees import RandomTrees
from tests.speculation.test_adaptive_speculation import Clock
from tests.tiny import run_all, tiny_engine, tiny_model

ALWAYS = 1e6
"""A `multi_step_ms` that no test reaches."""
MAX_LAUNCHES = 16


def add(engine: Engine, prompt: list[int], **params: object) -> str:
    return engine.add_request(
        prompt,
        SamplingParams(**({"temperature": 0, "max_tokens": 30, "ignore_eos": True} | params)),
    )  # type: ignore[arg-type]


def tokens_by_step(engine: Engine) -> list[int]:
    """Number of tokens of each step until the engine is idle. No request fails."""
    counts = []
    while engine.has_work:
        updates = engine.step()
        assert not any(update.result and update.result.error for update in updates)
        counts.append(sum(len(update.token_ids) for update in updates))
    return counts


TICK = 2**-10
"""Seconds of a launch whose sums are exact."""


def timed_engine(
    seconds: Iterable[float] = (), clock: Clock | None = None, **options: Any
) -> Engine:
    """An engine with simulated launch times, each followed by `TICK`. Multi-step decoding lasts
    three times that.
    """
    clock, times = clock or Clock(), chain(seconds, repeat(TICK))
    engine = toy_engine(multi_step_ms=3000 * TICK, clock=clock, **options)
    executable = engine._loop.executable
    assert isinstance(executable, ToyExecutable)
    run = executable.forward

    def forward(batch: RaggedBatch) -> NDArray[np.float32]:
        clock.now += next(times)
        return run(batch)

    executable.forward = forward  # type: ignore[method-assign]
    return engine


def test_launches_continue_until_multi_step_ms() -> None:
    engine = timed_engine()
    add(engine, [1, 2])
    assert tokens_by_step(engine) == [1, *[3] * 9, 2]


def test_slots_are_reserved_for_the_launches_in_multi_step_ms() -> None:
    """Two sequences with two tokens each share four blocks of four. Six more tokens of each fit,
    three at a time.
    """
    engine = timed_engine(num_blocks=4, block_size=4)
    for token in (1, 2):
        add(engine, [token, 3], max_tokens=14)
    assert tokens_by_step(engine)[:3] == [2, 2 * 3, 2 * 3]


def test_multi_step_resumes_after_a_slow_launch() -> None:
    engine = timed_engine([TICK, 1.0])
    add(engine, [1, 2])
    assert tokens_by_step(engine) == [1, 1, 1, *[3] * 9]


def test_launches_continue_while_results_are_late() -> None:
    engine = toy_engine(multi_step_ms=ALWAYS, late=True)
    add(engine, [1, 2])
    assert max(tokens_by_step(engine)) == MAX_LAUNCHES


class Watcher:
    """A proposer without drafts that reads the logits of every step it observes."""

    traits = ProposerTraits(4, needs_logits=True, in_engine_thread=True, time_limit=None)

    def __init__(self, clock: Clock) -> None:
        self.seen: list[bool] = []
        self.calls = 0
        self._clock = clock

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        self.calls += 1
        self._clock.now += TICK / 8
        return [NO_DRAFT] * len(seqs)

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        self.seen.append(result.logits is not None)


def test_a_proposer_observes_the_last_launch() -> None:
    clock = Clock()
    watcher = Watcher(clock)
    engine = timed_engine(clock=clock, proposer=watcher, adaptive_speculation=True)
    add(engine, [1, 2])
    counts = tokens_by_step(engine)
    assert max(counts) > 1 and len(watcher.seen) > 2 and all(watcher.seen)
    assert engine.stats().proposer_failures == 0


def test_several_launches_follow_when_no_draft_comes() -> None:
    clock = Clock()
    watcher = Watcher(clock)
    engine = timed_engine(clock=clock, proposer=watcher, adaptive_speculation=True)
    add(engine, [1, 2])
    tokens: list[int] = []
    while engine.has_work:
        calls = watcher.calls
        count = sum(len(update.token_ids) for update in engine.step())
        tokens += [count] if watcher.calls > calls else []
    assert max(tokens) > 1


def test_target_token_ms_is_compared_with_one_launch() -> None:
    engine = timed_engine(target_token_ms=2000 * TICK)
    add(engine, [1, 2])
    assert [sum(len(update.token_ids) for update in engine.step()) for _ in range(6)] == [
        1,
        *[3] * 5,
    ]
    add(engine, [3, 4])
    engine.step()
    assert engine.stats().running == 2


def test_slots_of_an_empty_draft_are_freed() -> None:
    """Four tokens fill a block, so a draft node would need another block."""
    engine = toy_engine(proposer=Watcher(Clock()), block_size=4, max_draft_tokens=1)
    add(engine, [1, 2, 3, 4])
    engine.step()
    assert engine.stats().blocks_used == 1


def test_the_first_token_comes_alone_then_several_together() -> None:
    engine = toy_engine(multi_step_ms=ALWAYS)
    add(engine, [1, 2])
    assert tokens_by_step(engine) == [1, MAX_LAUNCHES, 13]
    stats = engine.stats()
    assert (stats.steps, stats.rows, stats.rows_last) == (30, 31, 1)


def test_multi_step_ends_when_it_should_stop() -> None:
    engine, asked = toy_engine(multi_step_ms=ALWAYS), iter([False, False, True] * 20)
    add(engine, [1, 2])
    counts = []
    while engine.has_work:
        counts.append(sum(len(update.token_ids) for update in engine.step(lambda: next(asked))))
    assert counts == [1, *[3] * 9, 2]


def test_tokens_come_one_at_a_time_without_multi_step() -> None:
    for multi_step_ms in (0, 1e-6):
        engine = toy_engine(multi_step_ms=multi_step_ms)
        add(engine, [1, 2], max_tokens=5)
        assert tokens_by_step(engine) == [1] * 5


def test_launches_end_with_the_first_sequence_that_ends() -> None:
    free = plain_decoding([4], SamplingParams(temperature=0, max_tokens=30), 0)
    stop = free[6]
    engine = toy_engine(multi_step_ms=ALWAYS)
    add(engine, [4], stop_token_ids=[stop])
    add(engine, [5])
    counts = tokens_by_step(engine)
    length = free.index(stop, 1)
    assert counts[:2] == [2, 2 * (length - 1)] and sum(counts) == length + 30
    assert engine.stats().rows == length + 30  # no row was computed after an end


def test_launches_end_when_no_block_is_free() -> None:
    engine = toy_engine(multi_step_ms=ALWAYS, num_blocks=4, block_size=4)
    add(engine, [1, 2, 3], max_tokens=13)
    counts = tokens_by_step(engine)
    assert sum(counts) == 13 and 2 < max(counts) < 13
    assert engine.stats().blocks_free == 4


def test_launches_are_halved_until_the_blocks_suffice() -> None:
    """Two sequences with two tokens each share four blocks of four. Six more tokens of each fit,
    but not thirteen.
    """
    engine = toy_engine(multi_step_ms=ALWAYS, num_blocks=4, block_size=4)
    for token in (1, 2):
        add(engine, [token, 3], max_tokens=14)
    assert tokens_by_step(engine)[:2] == [2, 2 * 6]


def test_a_new_request_waits_for_one_multi_step() -> None:
    engine = toy_engine(multi_step_ms=ALWAYS)
    add(engine, [1, 2])
    engine.step()
    engine.step()
    other = add(engine, [3, 4], max_tokens=1)
    assert any(update.request_id == other for update in engine.step())


@pytest.mark.parametrize(
    "params", [{"n": 3, "temperature": 1.0}, {"beam_width": 3}, {"prompt_logprobs": 1}]
)
def test_multi_step_gives_the_same_results(params: dict[str, object]) -> None:
    results: list[list[RequestOutput]] = []
    for multi_step_ms in (0, ALWAYS):
        engine = toy_engine(multi_step_ms=multi_step_ms)
        ids = [add(engine, [1, 2, 3], **params), add(engine, [4])]
        found = {
            update.request_id: update.result
            for _ in range(200)
            for update in engine.step()
            if update.result
        }
        results.append([found[request] for request in ids])
    for one, other in zip(*results, strict=True):
        same(one, other, exact=True)


def test_non_finite_logits_in_multi_step_end_one_request() -> None:
    free = plain_decoding([4], SamplingParams(temperature=0, max_tokens=30), 0)
    engine = toy_engine(multi_step_ms=ALWAYS, broken=free[5])
    results = run_all(
        engine,
        [
            ([4], SamplingParams(temperature=0, max_tokens=30)),
            ([9, 9], SamplingParams(temperature=0, max_tokens=30)),
        ],
    )
    alone = run_all(
        toy_engine(broken=free[5]), [([9, 9], SamplingParams(temperature=0, max_tokens=30))]
    )
    assert (
        results[0].outputs[0].finish_reason == "error"
        and results[0].outputs[0].token_ids == free[1 : free.index(free[5], 1) + 1]
    )
    same(results[1], alone[0], exact=True)


def test_drafts_continue_with_multi_step() -> None:
    engine = toy_engine(multi_step_ms=ALWAYS, proposer=RandomTrees(0, 23, {}, max_nodes=4))
    add(engine, [1, 2], max_tokens=20)
    tokens_by_step(engine)
    assert engine.stats().drafted > 20


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_multi_step_on_a_real_backend(backend: str) -> None:
    model = tiny_model(5, window=40)
    requests = [
        (
            list(range(1, 30)),
            SamplingParams(
                temperature=0.8,
                seed=3,
                max_tokens=90,
                logprobs=2,
                presence_penalty=0.4,
                ignore_eos=True,
            ),
        ),
        ([7], SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)),
    ]
    plain, multi_step = (
        run_all(tiny_engine(model, backend, multi_step_ms=ms), requests) for ms in (0, ALWAYS)
    )
    for one, other in zip(plain, multi_step, strict=True):
        same(one, other, exact=True)
