"""A fleet over real engines, whose replicas go away at any moment: its clients hear what one engine
would have said, every word once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.outputs import Logprobs, RequestOutput
from headrace.remote import frames
from headrace.remote.errors import EngineDeadError, NotReadyError, RefusedError
from headrace.remote.stream import Stream
from headrace.request import PoolingParams
from headrace.sampling.sampler import derive_seed
from headrace.sampling_params import SamplingParams
from headrace.scaleout.fleet import Fleet
from tests.engine.test_resume import engine, requests, undisturbed
from tests.scaleout.replicas import LocalReplicas, Replica
from tests.tiny import drain, run_all


@dataclass
class Heard:
    """What a client heard of one request."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    ends: dict[int, tuple[str, int | str | None]] = field(default_factory=dict)
    ended: frames.Ended | None = None

    def add(self, event: frames.StepOutput | frames.Ended) -> None:
        assert self.ended is None
        if isinstance(event, frames.Ended):
            self.ended = event
            return
        assert event.index not in self.ends, "it goes on behind its end"
        self.texts[event.index] = self.texts.get(event.index, "") + event.text
        self.tokens[event.index] = self.tokens.get(event.index, []) + event.token_ids
        self.logprobs[event.index] = self.logprobs.get(event.index, []) + event.logprobs
        if event.finish_reason:
            self.ends[event.index] = event.finish_reason, event.stop_reason

    def is_like(self, result: RequestOutput) -> None:
        assert self.ended is not None
        if result.error:
            assert self.ended.error is not None
            return
        assert self.ended.error is None
        for output in result.outputs:
            assert self.texts[output.index] == output.text
            assert self.tokens[output.index] == output.token_ids
            assert self.logprobs[output.index] == (output.logprobs or [])
            assert self.ends[output.index] == (output.finish_reason, output.stop_reason)
        assert self.ended.prompt_logprobs == result.prompt_logprobs
        assert self.ended.prompt_tokens == len(result.prompt_token_ids)
        assert min(self.ended.queue, self.ended.prefill, self.ended.decode) >= 0


def add(
    prompt: list[int], params: SamplingParams | None = None, pooling: PoolingParams | None = None
) -> frames.Add:
    return frames.Add(prompt_token_ids=prompt, params=params, pooling=pooling)


async def hear(stream: Stream) -> Heard:
    heard = Heard()
    async for event in stream:
        heard.add(event)
    return heard


def within(
    work: Callable[[Fleet, LocalReplicas], Awaitable[None]], number: int = 2, **options: Any
) -> None:
    """Do something with a fleet of so many replicas."""

    async def run() -> None:
        replicas = LocalReplicas(engine, number)
        fleet = Fleet(replicas, **options)
        await fleet.start()
        try:
            async with asyncio.timeout(60):
                await work(fleet, replicas)
        finally:
            await fleet.close()
        assert not fleet._running

    asyncio.run(run())


def kill_at_random(replicas: LocalReplicas, seed: int, share: float, most: int) -> None:
    """Let replicas die as they say something, so that it is not heard, with this probability, and
    no more than so often.
    """
    random, left = Random(seed), [most]

    def on_event(replica: Replica, event: Any) -> None:
        if left[0] and random.random() < share:
            left[0] -= 1
            replicas.let_die(replica)

    replicas.on_event = on_event


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(requests(), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    share=st.sampled_from([0.02, 0.1, 0.5]),
)
def test_whichever_replica_dies_and_when(
    asked: list[tuple[list[int], SamplingParams]], seed: int, share: float
) -> None:
    """At most two: a third may be one too many for a request."""
    expected = [run_all(undisturbed(), [one])[0] for one in asked]

    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        kill_at_random(replicas, seed, share, 2)
        streams = await asyncio.gather(
            *(fleet.submit(add(list(prompt), params)) for prompt, params in asked)
        )
        for heard, result in zip(await asyncio.gather(*map(hear, streams)), expected, strict=True):
            heard.is_like(result)

    within(work)


def test_every_moment_of_one_request() -> None:
    """The replica dies at its first event, at its second, ..., and so at its last; then nothing has
    to be asked again.
    """
    prompt, params = (
        [1, 2, 3],
        SamplingParams(n=2, seed=5, max_tokens=8, logprobs=1, ignore_eos=True),
    )
    (expected,) = run_all(undisturbed(), [(prompt, params)])
    last_words: list[Any] = []

    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        moment, count = len(last_words), [0]

        def on_event(replica: Replica, event: Any) -> None:
            if count[0] == moment:
                last_words.append(event)
                replicas.let_die(replica)
            count[0] += 1

        replicas.on_event = on_event
        heard = await hear(await fleet.submit(add(prompt, params)))
        heard.is_like(expected)
        assert len(replicas.asked) == (1 if isinstance(last_words[-1], frames.Ended) else 2)

    while not last_words or not isinstance(last_words[-1], frames.Ended):
        within(work)
    assert len(last_words) == 2 + 2 * 8


def test_prompt_logprobs_of_a_request_that_had_told_all() -> None:
    params = SamplingParams(seed=1, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    (expected,) = run_all(undisturbed(), [([4, 5, 6], params)])

    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        replicas.on_event = lambda replica, event: (
            replicas.let_die(replica)
            if isinstance(event, frames.Ended) and len(replicas.asked) < 2
            else None
        )
        heard = await hear(await fleet.submit(add([4, 5, 6], params)))
        heard.is_like(expected)
        assert len(replicas.asked) == 2

    within(work)


def test_beams_and_embeddings_begin_from_their_prompts() -> None:
    beams = SamplingParams(beam_width=3, n=2, max_tokens=6, logprobs=0)
    (expected,) = run_all(undisturbed(), [([1, 2], beams)])
    one = undisturbed()
    one.add(one.check([3, 4, 5], pooling=PoolingParams()), "e")
    (vector,) = [update.result.embedding for update in drain(one) if update.result]
    assert vector is not None
    for moment in range(1, 5):

        async def work(fleet: Fleet, replicas: LocalReplicas, moment: int = moment) -> None:
            count = [0]

            def on_event(replica: Replica, event: Any) -> None:
                count[0] += 1
                if count[0] == moment:
                    replicas.let_die(replica)

            replicas.on_event = on_event
            heard = await hear(await fleet.submit(add([1, 2], beams)))
            heard.is_like(expected)
            count[0] = 0
            heard = await hear(await fleet.submit(add([3, 4, 5], pooling=PoolingParams())))
            assert (
                heard.ended is not None and heard.ended.embedding == vector.astype("<f4").tobytes()
            )
            assert not any(asked.output_token_ids for asked in replicas.asked)

        within(work)


def test_requests_without_a_seed_draw_what_one_engine_draws() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = [
        run_all(undisturbed(), [([1, 2], replace(params, seed=derive_seed(7, number)))])[0]
        for number in range(3)
    ]
    other = engine(seed=7)
    alone = run_all(other, [([1, 2], params)] * 3)
    other.close()
    assert [one.outputs for one in expected] == [one.outputs for one in alone]

    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        for result in expected:
            (await hear(await fleet.submit(add([1, 2], params)))).is_like(result)

    within(work, seed=7)


def test_one_under_which_replicas_die_is_refused_and_the_others_are_not() -> None:
    """All are on the same replica, so all are suspect after two deaths; from then on one at a
    time.
    """
    poison, plain = [9, 9, 9], SamplingParams(seed=2, max_tokens=90, ignore_eos=True)
    (expected,) = run_all(undisturbed(), [([1, 2], plain)])

    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        deaths = [0]

        def on_event(replica: Replica, event: Any) -> None:
            asked = {one.id: one for one in replicas.asked}[event.id]
            if asked.prompt_token_ids == poison and isinstance(event, frames.StepOutput):
                deaths[0] += 1
                replicas.let_die(replica)

        replicas.on_event = on_event
        asked = [([1, 2], replace(plain, min_tokens=i)) for i in range(4)] + [(poison, plain)]

        async def ask(prompt: list[int], params: SamplingParams) -> Heard:
            return await hear(await fleet.submit(add(prompt, params)))

        results = await asyncio.gather(*(ask(*one) for one in asked), return_exceptions=True)
        for heard in results[:4]:
            assert isinstance(heard, Heard), heard
            heard.is_like(expected)
        assert isinstance(results[4], RefusedError) and results[4].kind == "quarantined"
        assert deaths[0] == 3
        with pytest.raises(RefusedError, match="several engines ended"):
            await fleet.submit(add(poison, plain))
        assert deaths[0] == 3

    within(work, 1)


def test_it_waits_for_a_replica_and_not_for_ever() -> None:
    params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    (expected,) = run_all(undisturbed(), [([1, 2], params)])

    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        stream = await fleet.submit(add([1, 2], params))
        info = fleet.info
        for replica in replicas.alive[:]:
            replicas.let_die(replica, again=False)
        assert fleet.state == "stalled" and fleet.ready and fleet.info == info
        hearing = asyncio.ensure_future(hear(stream))
        with pytest.raises(NotReadyError, match="no worker"):
            await fleet.submit(add([1, 2], params))
        with pytest.raises(NotReadyError, match="no worker"):
            await hearing
        waiting = asyncio.ensure_future(fleet.submit(add([1, 2], params)))
        await asyncio.sleep(0.1)
        replicas.alive.append(replicas._born())
        (await hear(await waiting)).is_like(expected)
        assert fleet.state == "ready"

    within(work, wait_seconds=0.5)


def test_too_many_losses_end_a_request() -> None:
    """Of replicas that never took it, so it is not suspect."""

    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        replicas.on_event = lambda replica, event: replicas.let_die(replica)
        with pytest.raises((EngineDeadError, RefusedError)):
            await fleet.submit(add([1, 2], SamplingParams(max_tokens=4)))

    within(work)


def test_what_a_replica_refuses_is_refused() -> None:
    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        with pytest.raises(RefusedError, match="the vocabulary ends at"):
            await fleet.submit(add([1000], SamplingParams(max_tokens=4)))
        with pytest.raises(RefusedError, match="no adapter"):
            await fleet.load_adapter("a", "/nowhere")

    within(work)


def test_a_client_that_leaves_ends_its_request() -> None:
    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        stream = await fleet.submit(add([1, 2], SamplingParams(max_tokens=None, ignore_eos=True)))
        stream.close()
        while any(replica.thread.call(replica.engine.stats).running for replica in replicas.alive):
            await asyncio.sleep(0.01)
        assert not fleet._running

    within(work)


def test_what_the_replicas_are_together() -> None:
    async def work(fleet: Fleet, replicas: LocalReplicas) -> None:
        params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
        for _ in range(4):
            await hear(await fleet.submit(add([1, 2], params)))
        assert (
            fleet.info is not None
            and fleet.info.max_num_seqs == 3 * replicas.alive[0].engine.config.max_seqs
        )
        figures = fleet.report.figures
        assert (
            figures["tokens"] == 24 and figures["finished"] == 4 and figures["prompt_tokens"] == 8
        )
        assert figures["occupancy"] == 0
        blocks = figures["blocks_total"]
        gone = replicas.alive[0]
        replicas.let_die(gone, again=False)
        after = fleet.report.figures
        assert after["blocks_total"] == blocks * 2 / 3 and after["tokens"] == 24, (
            "what was counted is not taken back"
        )
        block_map = await fleet.block_map()
        assert len(block_map.groups) == 2 and block_map.block_size == 32

    within(work, 3)
