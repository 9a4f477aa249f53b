"""Adaptive speculation under a simulated clock: drafts run if they pay, and are probed if not."""

import random
import threading
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.batch import NO_DRAFT, Commit, DraftTree, RaggedBatch
from headrace.logit_ops import StepResult
from headrace.proposer import Pays, ProposerTraits, always_pays
from headrace.sampling_params import SamplingParams
from headrace.speculation.account import START_SECONDS
from headrace.speculation.proposers.trees import prune
from tests.engine.toy import VOCAB, ToyExecutable, toy_engine, toy_logits
from tests.tiny import run_all

LENGTH = 260
STEP_MS: dict[str, Callable[[int], float]] = {
    "135M on two cores": lambda rows: max(2.5, 0.3 + 0.45 * rows),
    "memory alone": lambda rows: 2.5,
    "arithmetic alone": lambda rows: float(rows),
}


class Clock:
    """A simulated clock in seconds, which the tests advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Oracle:
    """Drafts chains of greedy tokens, each right with a probability by its position."""

    traits = ProposerTraits(8, in_engine_thread=True, time_limit=None)

    def __init__(
        self, right: Callable[[int], float], clock: Clock | None = None, seconds: float = 0.0
    ) -> None:
        self._right, self._clock, self._seconds = right, clock, seconds
        self._random = random.Random(0)
        self.calls = 0

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        self.calls += len(seqs)
        if self._clock:
            self._clock.now += self._seconds * len(seqs)
        return [self._chain(seq.known, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None: ...

    def _chain(self, known: list[int], budget: int) -> DraftTree:
        chain: list[int] = []
        for _ in range(budget):
            token = int(toy_logits([*known, *chain]).argmax())
            right = self._random.random() < self._right(len(known) + len(chain))
            chain.append(token if right else (token + 1) % VOCAB)
        return DraftTree(chain, list(range(-1, budget - 1)))


def serve(
    step_ms: Callable[[int], float],
    proposers: Callable[[Clock], dict[str, Any]],
    *,
    seqs: int = 1,
    jitter: float = 0.0,
    warm: bool = True,
    prompt_len: int = 2,
    max_tokens: int = LENGTH,
    rounds: int = 1,
    **config: Any,
) -> tuple[float, Any, list[Any]]:
    """Serve `seqs` greedy requests at once; returns simulated seconds, statistics and tokens.

    `rounds` repeats this with other prompts. The tokens are those of the last. With `warm` the
    engine has served the same requests before. A step takes `step_ms(rows)` milliseconds. With
    `jitter` it takes up to that share more, and 2 % of the steps take five times as long.
    """
    clock, rng = Clock(), random.Random(1)
    options = {"adaptive_speculation": True, "max_draft_tokens": 8} | config
    engine = toy_engine(
        max_model_len=prompt_len + max_tokens + 20,
        num_blocks=2000,
        proposer=proposers(clock),
        clock=clock,
        **options,
    )
    executable = engine._loop.executable
    assert isinstance(executable, ToyExecutable)
    run = executable.forward

    def timed(batch: RaggedBatch) -> NDArray[np.float32]:
        clock.now += (
            step_ms(len(batch.tokens))
            / 1e3
            * (1 + jitter * rng.random())
            * (5 if jitter and rng.random() < 0.02 else 1)
        )
        return run(batch)

    executable.forward = timed  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompts = [[i % VOCAB, i // VOCAB] * (prompt_len // 2) for i in range(seqs * rounds)]
    requests = [(prompt, params) for prompt in prompts]
    start = 0.0
    if warm:
        run_all(engine, requests[:seqs])
        start = clock.now
    for first in range(0, len(requests), seqs):
        results = run_all(engine, requests[first : first + seqs])
    return clock.now - start, engine.stats(), [result.outputs[0].token_ids for result in results]


def speedup(
    step_ms: Callable[[int], float], right: Callable[[int], float], seqs: int, **options: Any
) -> float:
    """Speed with an oracle's drafts relative to plain decoding; the tokens are the same."""
    plain, _, expected = serve(step_ms, lambda clock: {}, seqs=seqs)
    seconds, stats, tokens = serve(
        step_ms, lambda clock: {"oracle": Oracle(right)}, seqs=seqs, **options
    )
    assert tokens == expected and stats.proposer_failures == 0
    return plain / seconds * _mean_jitter(options.get("jitter", 0.0))


def _mean_jitter(jitter: float) -> float:
    return (1 + jitter / 2) * (1.08 if jitter else 1)


@pytest.mark.parametrize("machine", STEP_MS)
@pytest.mark.parametrize("seqs", [1, 8])
@pytest.mark.parametrize("jitter", [0.0, 0.5])
def test_wrong_drafts_cost_next_to_nothing(machine: str, seqs: int, jitter: float) -> None:
    assert speedup(STEP_MS[machine], lambda position: 0.0, seqs, jitter=jitter) > (
        0.85 if jitter else 0.98
    )


@pytest.mark.parametrize("right", [0.5, 0.9])
def test_a_new_engine_loses_little_while_it_learns(right: float) -> None:
    assert speedup(STEP_MS["arithmetic alone"], lambda position: right, 1, warm=False) > 0.85


@pytest.mark.parametrize(
    ("machine", "seqs", "right", "min_speedup"),
    [
        ("135M on two cores", 1, 0.97, 4.0),
        ("135M on two cores", 1, 0.7, 2.2),
        ("135M on two cores", 8, 0.97, 0.98),
        ("memory alone", 1, 0.97, 5.0),
        ("memory alone", 8, 0.97, 4.0),
        ("memory alone", 1, 0.3, 1.2),
        ("arithmetic alone", 1, 0.97, 0.97),
        ("arithmetic alone", 8, 0.7, 0.97),
    ],
)
def test_right_drafts_pay_where_rows_are_cheap(
    machine: str, seqs: int, right: float, min_speedup: float
) -> None:
    assert speedup(STEP_MS[machine], lambda position: right, seqs) > min_speedup


def test_a_proposer_that_becomes_right_is_used_again() -> None:
    assert (
        speedup(STEP_MS["135M on two cores"], lambda position: float(position > LENGTH // 2), 1)
        > 1.5
    )


def test_wrong_drafts_are_slow_without_adaptive_speculation() -> None:
    assert (
        speedup(STEP_MS["135M on two cores"], lambda position: 0.0, 1, adaptive_speculation=False)
        < 0.7
    )


def test_a_slow_proposer_is_called_rarely() -> None:
    slow: list[Oracle] = []

    def make(clock: Clock) -> dict[str, Any]:
        slow.append(Oracle(lambda position: 0.0, clock, seconds=0.002))
        return {"slow": slow[0]}

    step_ms = STEP_MS["135M on two cores"]
    plain, _, _ = serve(step_ms, lambda clock: {})
    seconds, _, _ = serve(step_ms, make)
    assert plain / seconds > 0.93 and 0 < slow[0].calls < 2 * LENGTH // 8


class Busy(Oracle):
    """Is always wrong, and takes 0.1 ms for each call."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda position: 0.0, clock, seconds=0.0001)
        self.seen = 0

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        self.seen += 1
        assert self._clock
        self._clock.now += 0.0001


@pytest.mark.parametrize("seqs", [1, 8])
def test_speculation_pauses_while_it_does_not_pay(seqs: int) -> None:
    busy: list[Busy] = []

    def make(clock: Clock) -> dict[str, Any]:
        busy.append(Busy(clock))
        return {"busy": busy[0]}

    step_ms = STEP_MS["135M on two cores"]
    plain, _, _ = serve(step_ms, lambda clock: {}, seqs=seqs)
    seconds, _, _ = serve(step_ms, make, seqs=seqs)
    assert plain / seconds > 0.985 and 5 < busy[0].seen < 2 * LENGTH


class Interrupted(Oracle):
    """Takes a second longer in one call, as if another process used the machine."""

    at = 10
    """Number of calls before the long one."""

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        assert self._clock
        self._clock.now += self.calls == self.at
        return super().propose(seqs, budgets)


def test_one_interruption_does_not_stop_speculation_for_long() -> None:
    interrupted: list[Interrupted] = []

    def make(clock: Clock) -> dict[str, Any]:
        interrupted.append(Interrupted(lambda position: 0.8, clock, 0.0001))
        return {"interrupted": interrupted[0]}

    step_ms = STEP_MS["135M on two cores"]
    quiet, _, _ = serve(
        step_ms, lambda clock: {"oracle": Oracle(lambda position: 0.8, clock, 0.0001)}, warm=False
    )
    seconds, _, _ = serve(step_ms, make, warm=False)
    assert interrupted[0].calls > Interrupted.at and seconds - 1 < quiet + 0.12


class Deep(Oracle):
    """Takes 0.5 ms for each depth of its drafts."""

    traits = Oracle.traits._replace(width=1)

    def __init__(self, right: float, clock: Clock) -> None:
        super().__init__(lambda position: right)
        self.budgets: list[int] = []
        self._wall = clock

    def propose(
        self, seqs: list[Any], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        self.budgets += budgets
        self._wall.now += 0.0005 * max(budgets)
        return super().propose(seqs, budgets)


class Confident(Oracle):
    """Takes 0.5 ms for each node, and knows how often a node is right: a class for each."""

    traits = Oracle.traits._replace(width=1, acceptance=(0.5, 0.5, 0.5))

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda position: (0.05, 0.95)[self.is_sure(position)])
        self.lengths: dict[int, list[int]] = {0: [], 1: []}
        """Lengths of drafts by the number of sure nodes at their beginning, at most 1."""
        self._wall = clock

    @staticmethod
    def is_sure(position: int) -> bool:
        return position // 6 % 2 == 0

    def propose(
        self, seqs: list[Any], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        drafts = []
        for i, (seq, draft) in enumerate(zip(seqs, super().propose(seqs, budgets), strict=True)):
            start = len(seq.known)
            classes = [1 + self.is_sure(start + node) for node in range(len(draft.tokens))]
            length = 1
            while length < len(classes) and pays(i, classes[:length]):
                length += 1
            self._wall.now += 0.0005 * length
            self.lengths[classes[0] - 1].append(length)
            drafts.append(prune(draft._replace(confidence=classes), list(range(length))))
        return drafts


def test_drafts_end_below_nodes_of_low_confidence() -> None:
    """A draft goes on below a sure node, and ends below another."""
    confident: list[Confident] = []

    def make(clock: Clock) -> dict[str, Any]:
        confident.append(Confident(clock))
        return {"confident": confident[0]}

    step_ms = STEP_MS["memory alone"]
    plain, _, _ = serve(step_ms, lambda clock: {})
    seconds, stats, _ = serve(step_ms, make)
    lengths = confident[0].lengths
    assert median(lengths[0]) == 1 and median(lengths[1]) > 2
    assert plain / seconds > 1.1 and stats.accepted > 0.5 * stats.drafted


@pytest.mark.parametrize(("right", "depths"), [(0.3, range(1, 3)), (0.95, range(6, 9))])
def test_drafts_are_deeper_where_more_are_right(right: float, depths: range) -> None:
    deep: list[Deep] = []

    def make(clock: Clock) -> dict[str, Any]:
        deep.append(Deep(right, clock))
        return {"deep": deep[0]}

    serve(STEP_MS["memory alone"], make)
    assert int(median(deep[0].budgets)) in depths


def test_the_better_of_two_proposers_is_used() -> None:
    def make(clock: Clock) -> dict[str, Any]:
        return {"bad": Oracle(lambda position: 0.1), "good": Oracle(lambda position: 0.95)}

    _, stats, _ = serve(STEP_MS["memory alone"], make)
    assert stats.drafts["good"].accepted > 10 * stats.drafts["bad"].accepted
    assert stats.drafts["good"].seconds_saved > 0


@pytest.mark.parametrize("call_seconds", [0.0, 0.0005])
def test_draft_stats_agree_with_engine_stats_and_with_time_saved(call_seconds: float) -> None:
    def make(clock: Clock) -> dict[str, Any]:
        return {"oracle": Oracle(lambda position: 0.9, clock, call_seconds)}

    seconds, stats, tokens = serve(STEP_MS["135M on two cores"], make, warm=False)
    (drafts,) = stats.drafts.values()
    assert (drafts.proposed, drafts.accepted) == (stats.drafted, stats.accepted)
    assert stats.steps >= len(tokens[0]) - drafts.accepted and 0 < drafts.acceptance_rate < 1
    assert drafts.tokens_per_step == 1 + drafts.accepted / drafts.steps
    plain, _, _ = serve(STEP_MS["135M on two cores"], lambda clock: {}, warm=False)
    assert drafts.seconds_saved == pytest.approx(plain - seconds, rel=0.25, abs=0.02)


class Learner(Oracle):
    """Is right only if there were drafts in the last step."""

    traits = Oracle.traits._replace(learns_from_rows=True)

    def __init__(self) -> None:
        super().__init__(lambda position: float(self.ran))
        self.ran = False

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        self.ran = any(commit.draft.tokens for commit in commits)


def test_a_proposer_that_learns_from_rows_gets_some() -> None:
    _, stats, _ = serve(STEP_MS["memory alone"], lambda clock: {"learner": Learner()})
    assert stats.accepted > LENGTH


class Sleeper(Oracle):
    """Hangs after a few calls."""

    traits = ProposerTraits(8, time_limit=0.2)

    def __init__(self) -> None:
        super().__init__(lambda position: 1.0)
        self.wakes = threading.Event()

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        if self.calls > 5:
            self.wakes.wait()
        return super().propose(seqs, budgets)


def test_a_proposer_that_hangs_does_not_stop_the_engine() -> None:
    sleeper = Sleeper()
    _, _, expected = serve(STEP_MS["memory alone"], lambda clock: {})
    _, stats, tokens = serve(STEP_MS["memory alone"], lambda clock: {"sleeper": sleeper})
    sleeper.wakes.set()
    assert tokens == expected
    assert stats.proposer_failures == 1 and 0 < stats.accepted < LENGTH


def test_draft_stats_of_requests_add_up_to_those_of_the_engine() -> None:
    engine = toy_engine(proposer=Oracle(lambda position: 0.8), max_model_len=60)
    params = SamplingParams(temperature=0, max_tokens=40)
    results = run_all(
        engine,
        [([1], params), ([2, 3], params), ([4], SamplingParams(temperature=0, max_tokens=1))],
    )
    total = engine.stats().drafts["test"]
    first, second, third = (result.drafts for result in results)
    assert third == {}  # the last token needs no draft
    both = first["test"].plus(second["test"])
    assert both[:3] == total[:3] and both.seconds_saved == pytest.approx(total.seconds_saved)
    assert 0 < first["test"].accepted < first["test"].proposed and first != second


def test_drafts_have_at_most_max_draft_tokens() -> None:
    for max_tokens in (1, 3):
        engine = toy_engine(
            proposer=Oracle(lambda position: 1.0), max_model_len=60, max_draft_tokens=max_tokens
        )
        run_all(engine, [([1], SamplingParams(temperature=0, max_tokens=40))])
        drafts = engine.stats().drafts["test"]
        assert (
            drafts.tokens_per_step == pytest.approx(1 + max_tokens, rel=0.1)
            and drafts.proposed <= max_tokens * drafts.steps
        )


class Reader(Oracle):
    """Takes 40 ms to read the prompt in a first call, and drafts after ten tokens."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda position: 0.95, clock, seconds=0.00003)
        self._read: set[tuple[int, int]] = set()

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        assert self._clock
        self._clock.now += 0.04 * len({seq.seq_id for seq in seqs} - self._read)
        self._read |= {seq.seq_id for seq in seqs}
        drafts = super().propose(seqs, budgets)
        return [
            draft if len(seq.known) > 10 else NO_DRAFT
            for seq, draft in zip(seqs, drafts, strict=True)
        ]


def test_the_first_output_has_drafts_as_soon_as_they_are_right() -> None:
    """The first call takes long to read the prompt, and finds no draft."""
    step_ms = STEP_MS["135M on two cores"]
    plain, _, _ = serve(step_ms, lambda clock: {}, warm=False)
    seconds, stats, _ = serve(step_ms, lambda clock: {"reader": Reader(clock)}, warm=False)
    assert stats.accepted > 0.6 * LENGTH and plain / seconds > 2


class RowReader(Oracle):
    """Reads rows of the target: `read` seconds a prompt token, 0.02 ms a step, 0.3 ms a call."""

    traits = ProposerTraits(
        4, in_engine_thread=True, time_limit=None, needs_taps=True, acceptance=(0.5,)
    )

    def __init__(self, right: float, clock: Clock, read: float) -> None:
        super().__init__(lambda position: right)
        self._wall, self._read = clock, read
        self.num_followed = 0

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        self._wall.now += 0.0003 * len(seqs)
        return super().propose(seqs, budgets)

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        self.num_followed += len(commits)
        rows = sum(len(commit.rows) for commit in commits if len(commit.rows) > 1)
        self._wall.now += 0.00002 * len(commits) + self._read * rows


@pytest.mark.parametrize("seqs", [1, 4, 8])
def test_short_requests_pay_no_probe_each(seqs: int) -> None:
    """A drafter that is never right loses an allowance for the engine, not for each request."""
    readers: list[RowReader] = []

    def make(clock: Clock) -> dict[str, Any]:
        readers.append(RowReader(0.0, clock, 0.0003))
        return {"reader": readers[0]}

    size: dict[str, Any] = {"seqs": seqs, "prompt_len": 100, "max_tokens": 20, "rounds": 30}
    step_ms = STEP_MS["memory alone"]
    plain, _, expected = serve(step_ms, lambda clock: {}, warm=False, **size)
    seconds, stats, tokens = serve(step_ms, make, warm=False, **size)
    assert tokens == expected and stats.proposer_failures == 0
    assert seconds < 1.02 * plain + START_SECONDS + 0.02
    assert 0 < readers[0].num_followed < 0.1 * seqs * 30 * 20


def test_a_reader_of_rows_that_is_right_drafts_early() -> None:

    def step_ms(rows: int) -> float:
        return 2.5 + 0.01 * rows

    size: dict[str, Any] = {"seqs": 4, "prompt_len": 100, "max_tokens": 60, "rounds": 6}
    plain, _, expected = serve(step_ms, lambda clock: {}, warm=False, **size)
    seconds, stats, tokens = serve(
        step_ms, lambda clock: {"reader": RowReader(0.9, clock, 0.00003)}, warm=False, **size
    )
    assert tokens == expected and stats.drafts["reader"].accepted > 250
    assert plain / seconds > 1.05


@pytest.mark.parametrize(("right", "seqs"), [(0.5, 1), (0.8, 1), (0.8, 4)])
def test_a_quick_proposer_loses_little_by_a_slow_one(right: float, seqs: int) -> None:
    """Both draft as well, so the slow one is worth no call. It may only lose its allowance."""

    def quick(clock: Clock) -> dict[str, Any]:
        return {"quick": Oracle(lambda position: right)}

    def both(clock: Clock) -> dict[str, Any]:
        return {**quick(clock), "slow": Oracle(lambda position: right, clock, seconds=0.0005)}

    step_ms = STEP_MS["memory alone"]
    alone, _, _ = serve(step_ms, quick, seqs=seqs, rounds=8)
    seconds, _, _ = serve(step_ms, both, seqs=seqs, rounds=8)
    assert seconds < 1.02 * alone + START_SECONDS
