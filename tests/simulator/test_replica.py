"""Simulated replicas next to real engines on the same requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.engine.publish import WATCH
from headrace.program.op import StepSize
from headrace.sampling_params import SamplingParams
from headrace.simulator.replica import Replica
from headrace.simulator.trace import Conversation, Turn
from tests.simulator.setups import FlatCosts, run, setup
from tests.tiny import tiny_engine, tiny_model

BLOCK, NUM_BLOCKS = 4, 16


class Recorded:
    """The numbers of an engine's steps."""

    def __init__(self, engine: Engine) -> None:
        self.shares: list[float] = []
        while engine.has_work:
            engine.step()
            self.shares.append(engine.kv_share)
        stats = engine.stats()
        self.counters = (stats.steps, stats.rows, stats.preemptions, stats.cached_tokens)


def requests(seed: int) -> list[tuple[list[int], int]]:
    """Prompts, some with a common prefix, and output lengths."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(61, size=9).tolist()
    found = []
    for number in range(10):
        prompt = rng.integers(61, size=int(rng.integers(1, 24))).tolist()
        found.append((prefix + prompt if number % 2 else prompt, int(rng.integers(1, 30))))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 3, "max_num_seqs": 3},
        {"prefix_cache": False, "max_num_batched_tokens": 7},
        {"target_token_ms": 0.0, "chunked_prefill_size": 0},
    ],
    ids=str,
)
def test_steps_blocks_and_preemptions_are_those_of_a_real_engine(
    seed: int, options: dict[str, Any]
) -> None:
    """A real engine computes the requests of a tiny model; few blocks lead to preemptions."""
    real = tiny_engine(tiny_model(1), slots=BLOCK * NUM_BLOCKS, max_model_len=64, **options)
    limits = EngineLimits(
        real.limits.vocab_size, 64, KvConfig((NUM_BLOCKS,), BLOCK), real.limits.kv_groups
    )
    config = EngineConfig(multi_step_ms=0, **options)
    replica = Replica(setup(limits=limits, config=config))
    for number, (prompt, num_tokens) in enumerate(requests(seed)):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        real.add_request(prompt, params)
        replica.add(0.0, str(number), prompt, num_tokens, (None, None))
    expected = Recorded(real)

    shares, now = [], 0.0
    while replica.has_work:
        now = replica.step(now).end
        shares.append(replica.kv_share)
    stats = replica.stats
    assert shares == expected.shares
    found = (stats.steps, stats.rows, stats.preemptions, stats.cached_tokens)
    assert found == expected.counters
    assert now == pytest.approx(stats.steps)  # a second each


def test_few_blocks_lead_to_preemptions() -> None:
    real = tiny_engine(tiny_model(1), slots=BLOCK * NUM_BLOCKS, max_model_len=64)
    for prompt, num_tokens in requests(0):
        real.add_request(
            prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        )
    assert Recorded(real).counters[2] > 0


def test_a_request_waits_for_the_step_before_it() -> None:
    """The second request comes in the first step, of 2 s, and starts after it."""
    trace = [Conversation(0.0, [Turn(b"abc", 1)]), Conversation(0.5, [Turn(b"xyz", 2)])]
    first, second = run(trace, setup(costs=FlatCosts(2.0)))
    assert (first.came, first.queue, first.first_token, first.ended) == (0.0, 0.0, 2.0, 2.0)
    assert (second.came, second.queue, second.first_token, second.ended) == (0.5, 1.5, 4.0, 6.0)


def test_a_run_of_plain_steps_ends_at_the_next_request() -> None:
    """Runs take up to 10 ms: ten steps of 1 ms. The request comes after 2.5 ms."""
    trace = [Conversation(0.0, [Turn(b"abc", 40)]), Conversation(0.0045, [Turn(b"xyz", 1)])]
    config = EngineConfig(multi_step_ms=10)
    _, second = run(trace, setup(config=config, costs=FlatCosts(0.001)))
    assert second.queue == pytest.approx(0.0005)
    assert second.first_token == pytest.approx(0.006)


@pytest.mark.parametrize("in_flight, expected", [(1, 10 * 1.25), (2, 0.25 + 10 * 1.0)])
def test_host_work_overlaps_if_launches_do(in_flight: int, expected: float) -> None:
    """Steps take 1 s, and the engine 0.25 s, which a GPU hides except in the first step."""
    config = EngineConfig(multi_step_ms=0)
    one = setup(config=config, costs=FlatCosts(1.0, host=0.25), max_in_flight=in_flight)
    (served,) = run([Conversation(0.0, [Turn(b"abc", 10)])], one)
    assert served.ended == pytest.approx(expected)


def test_stages_work_on_several_steps_at_once() -> None:
    """Two sequences in two stages of 1 s: one token per second, since each token takes 2 s."""
    config = EngineConfig(multi_step_ms=0, pipeline_parallel_size=2)
    one = setup(config=config, costs=FlatCosts(1.0, 1.0), max_in_flight=2)
    trace = [Conversation(0.0, [Turn(bytes([number]), 20)]) for number in range(2)]
    ended = [served.ended for served in run(trace, one)]
    assert max(ended) < 1.1 * 20 * 2
    alone = run(trace[:1], one)[0].ended
    assert alone == 20 * 2


@pytest.mark.parametrize("acceptance, steps", [(0.0, 13), (1.0, 3)])
def test_drafts_are_accepted_with_their_probability(acceptance: float, steps: int) -> None:
    config = EngineConfig(multi_step_ms=0, max_draft_tokens=5, adaptive_speculation=False)
    one = setup(config=config, draft_depth=5, draft_acceptance=acceptance)
    replica = Replica(one)
    replica.add(0.0, "0", [1, 2, 3], 13, (None, None))
    now = 0.0
    while replica.has_work:
        now = replica.step(now).end
    assert replica.stats.steps == steps
    assert replica.stats.accepted == acceptance * replica.stats.drafted


def test_accepted_share_follows_the_probability() -> None:
    """Of chains of 3 with 0.5: (0.5 + 0.25 + 0.125) / 3 of the tokens are accepted."""
    config = EngineConfig(multi_step_ms=0, max_draft_tokens=3, adaptive_speculation=False)
    replica = Replica(setup(config=config, draft_depth=3, draft_acceptance=0.5))
    for number in range(30):
        replica.add(0.0, str(number), [number], 100, (None, None))
    now = 0.0
    while replica.has_work:
        now = replica.step(now).end
    stats = replica.stats
    assert stats.accepted / stats.drafted == pytest.approx(0.875 / 3, rel=0.05)


def test_speed_of_a_replica_is_that_of_its_steps() -> None:
    class Costs(FlatCosts):
        def stage_seconds(self, step: StepSize) -> Sequence[float]:
            context = sum(context for context, _ in step.seqs)
            return [1.0 + 0.01 * step.rows + 0.001 * context]

    config = EngineConfig(chunked_prefill_size=101, max_num_batched_tokens=128)
    speed = setup(config=config, costs=Costs()).speed()
    assert speed.step_seconds == pytest.approx(1.01)
    assert speed.row_seconds == pytest.approx(1.0 / 101)
    assert speed.sequence_seconds == pytest.approx(1.5)


def test_a_replica_is_not_shown_by_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real engine writes a record for a process that watches; a simulated one does not."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("HEADRACE_STATS", str(tmp_path))
    (tmp_path / WATCH).touch(0o600)
    run([Conversation(0.0, [Turn(b"abc", 2)])], setup())
    assert [file.name for file in tmp_path.iterdir()] == [WATCH]
    real = tiny_engine(tiny_model(1))
    real.add_request([1, 2], SamplingParams(max_tokens=2))
    Recorded(real)
    assert len(list(tmp_path.iterdir())) == 2


def test_work_on_a_new_request_delays_the_next_step() -> None:
    one = setup(config=EngineConfig(multi_step_ms=0), costs=FlatCosts(1.0, request=0.25))
    first, second = run(
        [Conversation(0.0, [Turn(b"a", 3)]), Conversation(0.5, [Turn(b"b", 1)])], one
    )
    assert first.ended == pytest.approx(0.25 + 1 + 0.25 + 1 + 1)
    assert second.first_token == pytest.approx(0.25 + 1 + 0.25 + 1)
