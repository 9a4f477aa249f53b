"""The speculation manager step by step: calls, drafts, observations and statistics."""

from typing import Any

import pytest

from headrace.batch import Commit
from headrace.config import EngineConfig
from headrace.engine.scheduled import ScheduledSequence
from headrace.logit_ops import StepResult
from headrace.sampling_params import SamplingParams
from headrace.speculation.adaptive_policy import AdaptivePolicy
from headrace.speculation.manager import SpeculationManager
from tests.engine.toy import VOCAB, toy_engine
from tests.speculation.test_adaptive_policy import Machine
from tests.speculation.test_adaptive_speculation import STEP_MS, Busy, Clock, Oracle, serve
from tests.tiny import run_all


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_drafts_end_at_max_tokens(max_tokens: int) -> None:
    engine = toy_engine(proposer=Oracle(lambda position: 1.0))
    run_all(engine, [([1], SamplingParams(temperature=0, max_tokens=max_tokens))])
    stats = engine.stats()
    assert (stats.drafted, stats.accepted, stats.steps) == (max_tokens - 1, max_tokens - 1, 1)


class Short(Oracle):
    """Drafts at most two tokens."""

    traits = Oracle.traits._replace(max_nodes=2)


@pytest.mark.parametrize("names", [("long", "short"), ("short", "long")])
def test_the_longest_draft_runs_without_adaptive_speculation(names: tuple[str, str]) -> None:
    oracles = {"long": Oracle(lambda position: 1.0), "short": Short(lambda position: 1.0)}
    engine = toy_engine(proposer={name: oracles[name] for name in names})
    run_all(engine, [([1], SamplingParams(temperature=0, max_tokens=18))])
    drafts = engine.stats().drafts
    assert drafts["long"][:3] == (2, 16, 16) and drafts["short"].steps == 0


def test_every_step_is_observed_without_adaptive_speculation() -> None:
    """This includes steps without a draft: the prompt, and the last token."""
    busy = Busy(Clock())
    engine = toy_engine(proposer=busy, max_num_batched_tokens=4)
    run_all(engine, [([1] * 11, SamplingParams(temperature=0, max_tokens=3))])
    assert busy.seen == engine.stats().steps == 5


def test_a_time_limit_is_in_seconds_of_the_clock() -> None:
    class Limited(Oracle):
        traits = Oracle.traits._replace(time_limit=0.5)

    clock = Clock()
    engine = toy_engine(proposer=Limited(lambda position: 1.0, clock, seconds=0.6), clock=clock)
    run_all(engine, [([1], SamplingParams(temperature=0, max_tokens=9))])
    assert (engine.stats().proposer_failures, engine.stats().drafted) == (1, 0)


class Watcher(Oracle):
    """Records the arguments of `observe`."""

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        self.shown = seqs, commits, result


def test_a_step_with_drafts_counts_savings_and_is_observed() -> None:
    """Each of two sequences has three draft tokens: two of the first are accepted, and the second
    sequence has failed.
    """
    engine, clock = toy_engine(), Clock()
    for prompt in ([1], [2]):
        engine.add_request(prompt)
    items = [
        ScheduledSequence(request.seqs[0], 1, can_sample=True, first_sample_row=5)
        for request in engine._requests.values()
    ]
    watcher = Watcher(lambda position: 1.0, clock, seconds=0.001)
    speculation = SpeculationManager(
        {"watcher": watcher}, EngineConfig(adaptive_speculation=False), VOCAB, clock
    )
    speculation._costs[2] = Machine()
    drafts, requested = speculation.plan(items)
    assert drafts and set(requested) == set(items)
    for item in items:
        item.draft_budget = 3
    speculation.draft(drafts)
    result = StepResult([], None)
    for _ in range(2):
        speculation.observe(
            items, drafts, [Commit(0, [0, 1], [1, 2, 3], [])], result, 8, 0.1, num_launches=1
        )
    assert watcher.shown == (
        [item.seq for item in items],
        [Commit(0, [0, 1], [1, 2, 3], [], row=5, draft=items[0].draft)],
        result,
    )
    call, token, row = 0.001, 0.0116 / 2, 0.0016
    saved = [2 * (2 * token - 3 * row - call), 2 * (-3 * row - call)]
    for item, accepted, seconds in zip(items, (4, 0), saved, strict=True):
        (stats,) = item.seq.request.drafts.values()
        assert stats[:3] == (2, 6, accepted) and stats.seconds_saved == pytest.approx(seconds)
    (total,) = speculation.stats.values()
    assert total[:3] == (4, 12, 4) and total.seconds_saved == pytest.approx(sum(saved))


def test_host_work_that_several_launches_would_share_is_booked() -> None:
    """A step with calls of 4 ms outside the launch, during pauses of steps with 4 launches."""
    balances = []
    for launches in (1, 4):
        engine, clock = toy_engine(), Clock()
        engine.add_request([1])
        item = ScheduledSequence(engine._requests["0"].seqs[0], 1, can_sample=True)
        speculation = SpeculationManager(
            {"watcher": Watcher(lambda position: 1.0)}, EngineConfig(), VOCAB, clock
        )
        speculation._costs[1] = Machine()
        args = [Commit(0, [], [1], [])], StepResult([], None), 1
        for _ in range(100):
            speculation.observe([item], None, *args, 0.01 * launches, num_launches=launches)
        drafts, _ = speculation.plan([item])
        assert drafts and drafts.calls
        item.draft_budget = 3
        speculation.draft(drafts)
        speculation.observe([item], drafts, *args, 0.014, num_launches=1, host_seconds=0.004)
        policy = speculation._policy
        assert isinstance(policy, AdaptivePolicy)
        balances.append(policy._account(policy._proposers["watcher"]).credit)
    assert balances[0] - balances[1] == pytest.approx(0.003, rel=0.01)


class TestStepCosts:
    """The recorded time of a step."""

    def step(
        self, clock: Clock, seconds: float = 0.0
    ) -> tuple[SpeculationManager, ScheduledSequence]:
        engine = toy_engine()
        engine.add_request([1])
        proposers = {"oracle": Oracle(lambda position: 1.0, clock, seconds)}
        speculation = SpeculationManager(
            proposers, EngineConfig(adaptive_speculation=False), VOCAB, clock
        )
        return speculation, ScheduledSequence(engine._requests["0"].seqs[0], 1, can_sample=True)

    def test_the_time_of_one_launch_without_calls_is_recorded(self) -> None:
        speculation, item = self.step(Clock(), seconds=0.5)
        drafts, requested = speculation.plan([item])
        assert drafts
        item.draft_budget = requested[item]
        speculation.draft(drafts)
        speculation.observe(
            [item], drafts, [Commit(0, [], [1], [])], StepResult([], None), 9, 3.5, num_launches=2
        )
        assert speculation._cost([item]).seconds(9) == pytest.approx(1.5, rel=0.01)

    def test_a_few_steps_are_recorded_while_speculation_is_paused(self) -> None:
        clock = Clock()
        speculation, item = self.step(clock)
        for i in range(64):
            clock.now = 100 + i / 64
            speculation.observe([item], None, [], StepResult([], None), 1, 0.002, num_launches=1)
        assert (
            speculation._cost([item]).visits(1) == 16
        )  # one of four: after more than 0.05 seconds


@pytest.mark.parametrize("others", [[], ["short"], ["short", "long"]])
def test_a_slow_proposer_is_not_called_if_a_quick_one_has_a_better_draft(
    others: list[str],
) -> None:
    """As with `auto` and a draft model. Alone, it is called in every step.

    A quick proposer after it is still called.
    """
    slow: list[Oracle] = []

    def make(clock: Clock) -> dict[str, Any]:
        slow.append(Oracle(lambda position: 0.6, clock, seconds=0.001))
        oracles = {
            "short": Short(lambda position: 1.0),
            "slow": slow[0],
            "long": Oracle(lambda position: 1.0),
        }
        return {name: oracles[name] for name in oracles if name in ["slow", *others]}

    _, stats, _ = serve(STEP_MS["memory alone"], make, warm=False)
    asked = slow[0].calls / stats.steps
    assert 0 < asked < 0.5 if others else asked > 0.8
    assert "long" not in others or stats.drafts["long"].steps > 0.8 * stats.steps
