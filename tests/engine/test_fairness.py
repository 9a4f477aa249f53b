"""Urgent requests preempt, small ones pass, and every request ends within a bound."""

import random
from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import scheduler as scheduling
from headrace.engine.engine import Engine
from headrace.engine.preemption import max_steps
from headrace.engine.scheduler import MAX_PASSING_STEPS
from headrace.engine.sequence import Sequence
from headrace.errors import RequestError
from headrace.outputs import RequestOutput
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.acceptors.beam_twin import beam_search
from tests.engine.toy import VOCAB, plain_decoding, toy_engine, toy_logits
from tests.random_trees import RandomTrees

GREEDY: dict[str, Any] = {"temperature": 0.0}


def add(engine: Engine, prompt: list[int], max_tokens: int, priority: int = 0, n: int = 1) -> str:
    params = SamplingParams(max_tokens=max_tokens, n=n, **GREEDY)
    return engine.add_request(prompt, params, options=RequestOptions(priority=priority))


def first_tokens(engine: Engine) -> dict[str, int]:
    """Run until all requests have ended; returns the step of each request's first token."""
    found: dict[str, int] = {}
    while engine.has_work:
        for update in engine.step():
            if update.token_ids:
                found.setdefault(update.request_id, engine.stats().steps)
    return found


class TestPreemption:
    @pytest.mark.parametrize("config", [{}, {"prefix_cache": False}, {"late": True}], ids=str)
    @pytest.mark.parametrize(("threshold", "preempts"), [(1, 1), (1000, 1), (1001, 0), (0, 0)])
    def test_for_a_place(self, threshold: int, preempts: int, config: dict[str, Any]) -> None:
        engine = toy_engine(
            max_num_seqs=2,
            max_model_len=210,
            num_blocks=200,
            priority_scheduling_preemption_threshold=threshold,
            **config,
        )
        for i in range(2):
            add(engine, [i, 1, 2], 200, priority=500)
        for _ in range(5):
            engine.step()
        urgent = add(engine, [7, 7], 5, priority=-500)
        found = first_tokens(engine)
        assert 5 < found[urgent] <= 9 if preempts else 200 <= found[urgent] <= 202
        assert engine.stats().preemptions == preempts
        assert engine.stats().steps <= 210  # the victim loses a few steps only

    @pytest.mark.parametrize(("n", "num_preempted"), [(1, 1), (3, 3), (4, 4)])
    def test_for_several_places(self, n: int, num_preempted: int) -> None:
        engine = toy_engine(max_num_seqs=4, max_model_len=100, num_blocks=200)
        for i in range(4):
            add(engine, [i], 90, priority=i)
        engine.step()
        urgent = add(engine, [7], 5, priority=-1, n=n)
        engine.step()
        assert engine.stats().preemptions == num_preempted
        running = {seq.request.id for seq in engine._scheduler.running}
        assert running == {str(i) for i in range(4 - num_preempted)} | {urgent}

    def test_for_memory(self) -> None:
        """One of two victims is enough, and the last in rank is too small to help."""
        engine = toy_engine(num_blocks=30, block_size=4, max_model_len=100)
        for length, priority in ((40, 1), (48, 1), (4, 2)):
            add(
                engine,
                [length] * length if length < VOCAB else [length % VOCAB] * length,
                40,
                priority,
            )
        for _ in range(3):
            engine.step()
        add(engine, [7] * 44, 4)
        engine.step()
        assert [seq.request.id for seq in engine._scheduler.running] == ["3", "0", "2"]
        assert engine.stats().preemptions == 1

    def test_a_request_that_ends_soon_is_not_preempted(self) -> None:
        """Without a prefix cache 80 tokens take 5 steps of 16, and the victim ends in 4."""
        for max_tokens, preempts in ((5, False), (10, True)):
            engine = toy_engine(
                max_num_seqs=1, max_model_len=120, num_blocks=60, prefix_cache=False
            )
            add(engine, [1] * 80, max_tokens, priority=1)
            engine.step()
            add(engine, [7], 2)
            first_tokens(engine)
            assert engine.stats().preemptions == preempts

    def test_an_older_request_is_not_preempted(self) -> None:
        """Waiting of 1,000 steps outweighs one level of priority."""
        engine = toy_engine(max_num_seqs=1, max_model_len=1200, num_blocks=400)
        add(engine, [1], 1100, priority=1)
        for _ in range(1001):
            engine.step()
        add(engine, [7], 2)
        first_tokens(engine)
        assert engine.stats().preemptions == 0

    def test_static_batches_are_not_preempted(self) -> None:
        engine = toy_engine(max_num_seqs=1, batching="static")
        add(engine, [1], 30, priority=1)
        engine.step()
        urgent = add(engine, [7], 2)
        assert first_tokens(engine)[urgent] == 31


class TestPassing:
    def test_small_requests_use_places_that_the_first_cannot(self) -> None:
        engine = toy_engine(num_blocks=100, block_size=8, max_model_len=800)
        add(engine, [1] * 390, 400)
        engine.step()
        large = add(engine, [2] * 500, 10)
        small = [add(engine, [3 + i], 10) for i in range(8)]
        long = add(engine, [12], MAX_PASSING_STEPS + 1)
        found = first_tokens(engine)
        assert max(found[request] for request in small) <= 4
        assert 400 < min(found[large], found[long]) <= max(found[large], found[long]) <= 402

    def test_a_stream_of_small_requests_holds_the_first_up_by_a_bound(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From the step in which the first would fit alone, no request passes it."""
        monkeypatch.setattr(scheduling, "MAX_PASSING_STEPS", 20)
        engine = toy_engine(num_blocks=60, block_size=4, max_model_len=230, chunked_prefill_size=64)
        add(engine, [1] * 100, 50)
        engine.step()
        large = add(engine, [2] * 200, 4)
        found = 0
        passed = 0
        while not found:
            if len(engine._scheduler.waiting) < 4:
                add(engine, [3 + engine.stats().steps % 9] * 4, 16)
            for update in engine.step():
                passed += bool(update.result and update.request_id not in ("0", large))
                if update.request_id == large:
                    found = engine.stats().steps
            assert engine.stats().steps < 200
        assert passed > 10
        assert 50 < found <= 50 + 20 + 4 + 2  # its prompt takes four chunks


class TestPromptRows:
    """A long prompt leaves rows to urgent and to short prompts, also with flat attention."""

    @pytest.mark.parametrize(("priority", "latest"), [(0, 24), (-1, 6)])
    @pytest.mark.parametrize("decodes", [True, False])
    def test_short_prompts_pass_a_long_one(self, priority: int, latest: int, decodes: bool) -> None:
        engine = toy_engine(
            max_model_len=1000, num_blocks=400, chunked_prefill_size=8, max_num_batched_tokens=32
        )
        if decodes:
            add(engine, [1], 400)
        long = add(engine, [2] * 900, 2)
        for _ in range(4):
            engine.step()
        short = [add(engine, [3 + i] * 10, 2, priority) for i in range(4)]
        found = first_tokens(engine)
        assert max(found[request] for request in short) <= 4 + latest
        # Four prompts of 10 rows, and a few steps that decode.
        assert found[long] <= (120 if decodes else 60)

    def test_a_prompt_that_shares_the_next_block_waits_for_it(self) -> None:
        engine = toy_engine(max_model_len=300, num_blocks=200, chunked_prefill_size=8)
        add(engine, [1], 100)
        engine.step()
        text = [i % VOCAB for i in range(40)]
        add(engine, text + [2] * 160, 2)
        engine.step()
        add(engine, [*text, 5], 2)
        first_tokens(engine)
        assert engine.stats().cached_tokens == 40

    def test_equal_prompts_come_in_order(self) -> None:
        engine = toy_engine(max_model_len=80, chunked_prefill_size=8)
        requests = [add(engine, [i] * 30, 3) for i in range(6)]
        found = first_tokens(engine)
        assert sorted(requests, key=found.__getitem__) == requests


class WaitingTimes:
    """Counts the steps in which only passers keep the first waiting sequence from its place."""

    def __init__(self, engine: Engine) -> None:
        self.num_passed = 0
        self.longest = 0
        self._scheduler = engine._scheduler
        self._passers: dict[Sequence, set[Sequence]] = {}
        self._steps: dict[Sequence, int] = {}
        self._started = self._scheduler._start
        self._scheduler._start = self._start  # type: ignore[method-assign]

    def _start(self, seq: Sequence, *args: Any) -> None:
        for other in self._scheduler.waiting:
            if other.rank < seq.rank:
                self._passers.setdefault(other, set()).add(seq)
                self.num_passed += 1
        self._passers.pop(seq, None)
        self._steps.pop(seq, None)
        self._started(seq, *args)

    def count(self) -> None:
        scheduler = self._scheduler
        if not scheduler.waiting:
            return
        first = scheduler.waiting[0]
        hit = scheduler._match_prefix(first)
        if scheduler._may_run(first) and scheduler._fits(first, hit):
            return  # It waits for rows.
        place = bisect_left(scheduler.running, first.rank, key=lambda seq: seq.rank)
        before, after = scheduler.running[:place], scheduler.running[place:]
        has_place = sum(seq.width for seq in (*before, first)) <= scheduler._config.max_seqs
        fits = not before or scheduler._preemption.fits(first, hit, before, after)
        if has_place and fits and self._passers.get(first, set()).issuperset(after):
            self._steps[first] = self._steps.get(first, 0) + 1
            self.longest = max(self.longest, self._steps[first])


@pytest.mark.parametrize("seed", [3, 8, 16])
def test_no_random_arrivals_hold_the_first_up_for_longer_than_the_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither few rows, the depth of prompts, forks nor priorities stretch the bound."""
    monkeypatch.setattr(scheduling, "MAX_PASSING_STEPS", bound := 8)
    random_ = random.Random(seed)
    engine = toy_engine(
        num_blocks=80,
        max_model_len=200,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        chunked_prefill_size=4,
        attention_crossover=4.0,
        prefix_cache=seed % 2 == 0,
        late=seed % 3 == 0,
        priority_scheduling_preemption_threshold=seed % 2,
    )
    times = WaitingTimes(engine)
    num_left = 40
    while num_left or engine.has_work:
        if num_left and random_.random() < 0.5:
            num_left -= 1
            is_large = random_.random() < 0.3
            prompt = [1, random_.randrange(VOCAB)] * random_.randint(1, 60 if is_large else 20)
            length = random_.randint(1, 60 if is_large else 16)
            n, priority = random_.choice([1, 1, 2]), random_.choice([0, 0, 0, -1, 1])
            with suppress(RequestError):  # it needs more than all blocks
                add(engine, prompt, length, priority, n)
        engine.step()
        times.count()
    # The steps are counted by eight, and victims wait for steps in flight.
    assert times.num_passed > 10
    assert 0 < times.longest <= bound + 8


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "gap": st.integers(0, 6),
            "length": st.integers(1, 26),
            "max_tokens": st.integers(1, 14),
            "priority": st.sampled_from([-3, -1, 0, 0, 0, 1, 2]),
            "n": st.sampled_from([1, 1, 1, 2, 4]),
            "beam": st.sampled_from([False, False, False, True]),
            "shared": st.booleans(),
            "temperature": st.sampled_from([0.0, 1.0]),
        }
    ),
    min_size=2,
    max_size=14,
)


class Admissions:
    """Checks each preemption by priority and each pass, and counts them."""

    def __init__(self, engine: Engine) -> None:
        self.num_urgent = self.num_passed = 0
        scheduler = self._scheduler = engine._scheduler
        self._choose = scheduler._preemption.choose_victims
        self._started = scheduler._start
        scheduler._preemption.choose_victims = self._chosen  # type: ignore[method-assign]
        scheduler._start = self._start  # type: ignore[method-assign]

    def _chosen(self, urgent: Sequence, *args: Any) -> list[Sequence]:
        victims = self._choose(urgent, *args)
        threshold = self._scheduler._config.priority_scheduling_preemption_threshold
        for victim in victims:
            assert victim.rank > urgent.rank
            gap = victim.request.options.priority - urgent.request.options.priority
            assert gap >= threshold > 0
        self.num_urgent += bool(victims)
        return victims

    def _start(self, seq: Sequence, *args: Any) -> None:
        passed = [other for other in self._scheduler.waiting if other.rank < seq.rank]
        if passed:
            self.num_passed += 1
            first = passed[0]
            assert seq.width * seq.length < first.width * first.length
            chunk = self._scheduler._config.max_chunk_rows
            assert max_steps(seq, chunk) <= scheduling.MAX_PASSING_STEPS
        self._started(seq, *args)


def expected(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    if params.beam_width is None:
        return [plain_decoding(prompt, params, i)[len(prompt) :] for i in range(params.n)]
    beams = beam_search(prompt, params, toy_logits, VOCAB, 40)
    return [beam.tokens for beam in beams][: params.n]


def run_mixture(engine: Engine, requests: Iterable[dict[str, Any]]) -> Admissions:
    """Check tokens, the end of each request, and that no block is lost."""
    admissions = Admissions(engine)
    random_ = random.Random(5)
    truth: dict[str, list[list[int]]] = {}
    results: dict[str, RequestOutput] = {}
    bound = 0

    def step() -> None:
        results.update({u.request_id: u.result for u in engine.step() if u.result})

    for i, asked in enumerate(requests):
        for _ in range(asked["gap"]):
            step()
        prompt = [random_.randrange(VOCAB) for _ in range(asked["length"])]
        if asked["shared"]:
            prompt = ([1, 2, 3] * 9)[: asked["length"] - 1] + prompt[-1:]
        sampling: dict[str, Any] = {"temperature": asked["temperature"], "seed": i, "n": asked["n"]}
        if asked["beam"]:
            sampling = {"temperature": 0.0, "beam_width": asked["n"], "n": asked["n"]}
        params = SamplingParams(max_tokens=asked["max_tokens"], **sampling)
        options = RequestOptions(priority=asked["priority"])
        try:
            request_id = engine.add_request(prompt, params, options=options)
        except RequestError:  # it needs more than all blocks
            continue
        truth[request_id] = expected(prompt, params)
        bound += asked["n"] * (asked["length"] + asked["max_tokens"])
    for _ in range(bound + 1):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work, "each step has a row of the first in rank"
    for request_id, outputs in truth.items():
        assert [output.token_ids for output in results[request_id].outputs] == outputs
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    return admissions


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    config=st.fixed_dictionaries(
        {
            "num_blocks": st.integers(12, 50),
            "block_size": st.sampled_from([1, 3, 4]),
            "max_num_seqs": st.integers(4, 6),
            "max_num_batched_tokens": st.sampled_from([5, 16, 512]),
            "chunked_prefill_size": st.sampled_from([1, 4, 16]),
            "attention_crossover": st.sampled_from([4.0, float("inf")]),
            "prefix_cache": st.booleans(),
            "late": st.booleans(),
            "windows": st.sampled_from([(0,), (0, 5)]),
            "priority_scheduling_preemption_threshold": st.sampled_from([0, 1, 3]),
        }
    ),
    max_nodes=st.sampled_from([0, 6]),
)
def test_random_mixtures(
    requests: list[dict[str, Any]], config: dict[str, Any], max_nodes: int
) -> None:
    proposer = RandomTrees(0, VOCAB, {}, max_nodes=max_nodes) if max_nodes else None
    run_mixture(toy_engine(proposer=proposer, **config), requests)


def test_a_mixture_preempts_and_passes() -> None:
    """The generator above meets both cases often."""
    random_ = random.Random(1)
    requests = [
        {
            "gap": random_.randrange(4),
            "length": random_.choice([1, 2, 26]),
            "max_tokens": random_.randint(4, 14),
            "priority": random_.choice([-3, 0, 0, 2]),
            "n": random_.choice([1, 2]),
            "beam": random_.random() < 0.2,
            "shared": random_.random() < 0.5,
            "temperature": 1.0,
        }
        for _ in range(60)
    ]
    admissions = run_mixture(toy_engine(num_blocks=14, max_num_seqs=4), requests)
    assert admissions.num_urgent > 5 and admissions.num_passed > 5
