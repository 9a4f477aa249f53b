"""A fleet over real engines that are lost at any moment: its clients get the output of one engine,
each token once.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.engine import Engine
from headrace.errors import ReplicasFullError
from headrace.outputs import Logprobs, RequestOutput
from headrace.remote import frames
from headrace.remote.errors import EngineDeadError, NotReadyError, RefusedError
from headrace.remote.quarantine import request_key
from headrace.remote.stream import Stream
from headrace.request import PoolingParams, RequestOptions
from headrace.sampling.sampler import derive_seed
from headrace.sampling_params import SamplingParams
from headrace.scaleout.dispatcher import RequestEvent
from headrace.scaleout.fleet import Fleet
from tests.engine.test_resume import (
    engine,
    requests,
    undisturbed,
    undisturbed_is_freed,  # noqa: F401 - a fixture
)
from tests.scaleout.replicas import LocalReplicas, Replica
from tests.tiny import drain, run_all


@dataclass
class Received:
    """Events of one request, as its client received them."""

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
        assert event.index not in self.ends, "an output after its end"
        self.texts[event.index] = self.texts.get(event.index, "") + event.text
        self.tokens[event.index] = self.tokens.get(event.index, []) + event.token_ids
        self.logprobs[event.index] = self.logprobs.get(event.index, []) + event.logprobs
        if event.finish_reason:
            self.ends[event.index] = event.finish_reason, event.stop_reason

    def assert_equals(self, result: RequestOutput) -> None:
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


async def receive(stream: Stream) -> Received:
    received = Received()
    async for event in stream:
        received.add(event)
    return received


def run(
    test: Callable[[Fleet, Any], Awaitable[None]],
    number: int = 2,
    replicas: type[LocalReplicas] = LocalReplicas,
    **options: Any,
) -> None:
    """Run a test with a fleet of `number` replicas."""

    async def main() -> None:
        dispatcher = replicas(engine, number)
        fleet = Fleet(dispatcher, **options)
        await fleet.start()
        try:
            async with asyncio.timeout(60):
                await test(fleet, dispatcher)
        finally:
            await fleet.close()
        assert not fleet._running

    asyncio.run(main())


def test_fleets_without_a_base_seed_repeat_no_noise() -> None:
    tokens: list[list[int]] = []

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        received = await receive(await fleet.submit(add([1], SamplingParams(max_tokens=20))))
        tokens.append(received.tokens[0])

    for seed in (None, None, 0, 0):
        run(test, seed=seed)
    assert tokens[2] == tokens[3] and len(set(map(tuple, tokens))) == 3


def kill_at_random(replicas: LocalReplicas, seed: int, probability: float, max_deaths: int) -> None:
    """Kill replicas with a probability per event, which is then lost."""
    random, left = Random(seed), [max_deaths]

    def on_event(replica: Replica, event: Any) -> None:
        if left[0] and random.random() < probability:
            left[0] -= 1
            replicas.kill(replica)

    replicas.on_event = on_event


@settings(max_examples=60, deadline=None)
@given(
    submitted=st.lists(requests(), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    probability=st.sampled_from([0.02, 0.1, 0.5]),
)
def test_deaths_at_random_events_change_no_output(
    submitted: list[tuple[list[int], SamplingParams]], seed: int, probability: float
) -> None:
    """At most two deaths: after a third a request may be refused."""
    expected = [run_all(undisturbed(), [request])[0] for request in submitted]

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        kill_at_random(replicas, seed, probability, 2)
        streams = await asyncio.gather(
            *(fleet.submit(add(list(prompt), params)) for prompt, params in submitted)
        )
        results = await asyncio.gather(*map(receive, streams))
        for received, result in zip(results, expected, strict=True):
            received.assert_equals(result)

    run(test)


def test_death_at_each_event_of_a_request() -> None:
    """If the replica dies at its last event, no other replica has to run the request."""
    prompt, params = (
        [1, 2, 3],
        SamplingParams(n=2, seed=5, max_tokens=8, logprobs=1, ignore_eos=True),
    )
    (expected,) = run_all(undisturbed(), [(prompt, params)])
    lost_events: list[Any] = []

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        moment, count = len(lost_events), [0]

        def on_event(replica: Replica, event: Any) -> None:
            if count[0] == moment:
                lost_events.append(event)
                replicas.kill(replica)
            count[0] += 1

        replicas.on_event = on_event
        received = await receive(await fleet.submit(add(prompt, params)))
        received.assert_equals(expected)
        assert len(replicas.requests) == (1 if isinstance(lost_events[-1], frames.Ended) else 2)

    while not lost_events or not isinstance(lost_events[-1], frames.Ended):
        run(test)
    assert len(lost_events) == 2 + 2 * 8


def test_prompt_logprobs_after_all_outputs_were_received() -> None:
    params = SamplingParams(seed=1, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    (expected,) = run_all(undisturbed(), [([4, 5, 6], params)])

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        replicas.on_event = lambda replica, event: (
            replicas.kill(replica)
            if isinstance(event, frames.Ended) and len(replicas.requests) < 2
            else None
        )
        received = await receive(await fleet.submit(add([4, 5, 6], params)))
        received.assert_equals(expected)
        assert len(replicas.requests) == 2

    run(test)


def test_beams_and_embeddings_restart_from_their_prompts() -> None:
    beams = SamplingParams(beam_width=3, n=2, max_tokens=6, logprobs=0)
    (expected,) = run_all(undisturbed(), [([1, 2], beams)])
    alone = undisturbed()
    alone.add(alone.check([3, 4, 5], pooling=PoolingParams()), "e")
    (vector,) = [update.result.embedding for update in drain(alone) if update.result]
    assert vector is not None
    for moment in range(1, 5):

        async def test(fleet: Fleet, replicas: LocalReplicas, moment: int = moment) -> None:
            count = [0]

            def on_event(replica: Replica, event: Any) -> None:
                count[0] += 1
                if count[0] == moment:
                    replicas.kill(replica)

            replicas.on_event = on_event
            received = await receive(await fleet.submit(add([1, 2], beams)))
            received.assert_equals(expected)
            count[0] = 0
            received = await receive(await fleet.submit(add([3, 4, 5], pooling=PoolingParams())))
            assert (
                received.ended is not None
                and received.ended.embedding == vector.astype("<f4").tobytes()
            )
            assert not any(request.output_token_ids for request in replicas.requests)

        run(test)


def test_requests_without_a_seed_sample_the_tokens_of_one_engine() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = [
        run_all(undisturbed(), [([1, 2], replace(params, seed=derive_seed(7, number)))])[0]
        for number in range(3)
    ]
    other = engine(seed=7)
    alone = run_all(other, [([1, 2], params)] * 3)
    other.close()
    assert [result.outputs for result in expected] == [result.outputs for result in alone]

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        for result in expected:
            (await receive(await fleet.submit(add([1, 2], params)))).assert_equals(result)

    run(test, seed=7)


def test_only_the_request_that_kills_replicas_is_refused() -> None:
    """All run on the same replica, so after two deaths all are suspects and run one at a time."""
    poison, plain = [9, 9, 9], SamplingParams(seed=2, max_tokens=90, ignore_eos=True)
    unseeded = replace(plain, seed=None)
    (expected,) = run_all(undisturbed(), [([1, 2], plain)])

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        deaths = [0]

        def on_event(replica: Replica, event: Any) -> None:
            request = {request.id: request for request in replicas.requests}[event.id]
            if request.prompt_token_ids == poison and isinstance(event, frames.StepOutput):
                deaths[0] += 1
                replicas.kill(replica)

        replicas.on_event = on_event
        submitted = [([1, 2], replace(plain, min_tokens=i)) for i in range(4)] + [
            (poison, unseeded)
        ]

        async def submit(prompt: list[int], params: SamplingParams) -> Received:
            return await receive(await fleet.submit(add(prompt, params)))

        results = await asyncio.gather(
            *(submit(*request) for request in submitted), return_exceptions=True
        )
        for received in results[:4]:
            assert isinstance(received, Received), received
            received.assert_equals(expected)
        assert isinstance(results[4], RefusedError) and results[4].kind == "quarantined"
        assert deaths[0] == 3
        with pytest.raises(RefusedError, match="several engines ended"):
            await fleet.submit(add(poison, unseeded))
        assert deaths[0] == 3

    run(test, 1)


def test_requests_wait_for_a_replica_up_to_a_limit() -> None:
    params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    (expected,) = run_all(undisturbed(), [([1, 2], params)])

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        stream = await fleet.submit(add([1, 2], params))
        info = fleet.info
        for replica in replicas.alive[:]:
            replicas.kill(replica, replace=False)
        assert fleet.state == "stalled" and fleet.ready and fleet.info == info
        receiving = asyncio.ensure_future(receive(stream))
        with pytest.raises(NotReadyError, match="none is alive, and the request has waited"):
            await fleet.submit(add([1, 2], params))
        with pytest.raises(NotReadyError, match="none is alive, and the request has waited"):
            await receiving
        waiting = asyncio.ensure_future(fleet.submit(add([1, 2], params)))
        await asyncio.sleep(0.1)
        replicas.alive.append(replicas._new_replica())
        (await receive(await waiting)).assert_equals(expected)
        assert fleet.state == "ready"

    run(test, wait_seconds=0.5)


def test_too_many_losses_end_a_request() -> None:
    """The replicas had not accepted the request, so it is no suspect."""

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        replicas.on_event = lambda replica, event: replicas.kill(replica)
        with pytest.raises((EngineDeadError, RefusedError)):
            await fleet.submit(add([1, 2], SamplingParams(max_tokens=4)))

    run(test)


def test_refusal_of_a_replica() -> None:
    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        with pytest.raises(RefusedError, match="the vocabulary ends at"):
            await fleet.submit(add([1000], SamplingParams(max_tokens=4)))
        with pytest.raises(RefusedError, match="no adapter"):
            await fleet.load_adapter("a", "/nowhere")

    run(test)


def test_closing_a_stream_aborts_its_request() -> None:
    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        stream = await fleet.submit(add([1, 2], SamplingParams(max_tokens=None, ignore_eos=True)))
        stream.close()
        while any(replica.thread.call(replica.engine.stats).running for replica in replicas.alive):
            await asyncio.sleep(0.01)
        assert not fleet._running

    run(test)


def test_combined_info_report_and_blocks() -> None:
    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
        for _ in range(4):
            await receive(await fleet.submit(add([1, 2], params)))
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
        replicas.kill(replicas.alive[0], replace=False)
        after = fleet.report.figures
        assert after["blocks_total"] == blocks * 2 / 3
        assert after["tokens"] == 24, "counters keep the share of lost replicas"
        block_map = await fleet.block_map()
        assert len(block_map.groups) == 2 and block_map.block_size == 32

    run(test, 3)


class FullReplicas(LocalReplicas):
    """Replicas that run one request at a time, in total."""

    def __init__(self, make: Callable[[], Engine], number: int) -> None:
        super().__init__(make, number)
        self.is_busy, self.num_tries, self.order = False, 0, list[str]()
        self._freed = asyncio.Event()

    async def changed(self) -> None:
        await self._freed.wait()
        self._freed.clear()

    async def generate(self, request: frames.Add) -> AsyncGenerator[RequestEvent]:
        self.num_tries += 1
        if self.is_busy:
            raise ReplicasFullError("the queues of all workers are full")
        self.is_busy = True
        self.order.append(request.id)
        try:
            async with aclosing(super().generate(request)) as events:
                async for event in events:
                    yield event
        finally:
            self.is_busy = False
            self._freed.set()


def test_full_replicas_serve_by_priority_and_arrival() -> None:
    """A request is sent when its turn comes, not again and again."""
    params = SamplingParams(seed=3, max_tokens=4, ignore_eos=True)
    (expected,) = run_all(undisturbed(), [([1, 2], params)])

    async def test(fleet: Fleet, replicas: FullReplicas) -> None:
        async def submit(priority: int) -> Received:
            options = RequestOptions(priority=priority)
            request = msgspec.structs.replace(add([1, 2], params), options=options)
            return await receive(await fleet.submit(request))

        received = await asyncio.gather(*map(submit, [0, 0, 2, 0, -1, 0]))
        for each in received:
            each.assert_equals(expected)
        assert replicas.order == ["0", "4", "1", "3", "5", "2"]
        assert replicas.num_tries <= 2 * len(received)

    run(test, 1, replicas=FullReplicas)


def test_wait_for_full_replicas_says_so() -> None:
    async def test(fleet: Fleet, replicas: FullReplicas) -> None:
        replicas.is_busy = True
        with pytest.raises(NotReadyError, match="are full, and the request has") as full:
            await fleet.submit(add([1, 2]))
        assert full.value.state == "full"

    run(test, 1, replicas=FullReplicas, wait_seconds=0.05)


def test_request_without_a_seed_is_known_when_it_comes_again() -> None:
    """Whatever seed and time limit it gets here."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    async def test(fleet: Fleet, replicas: LocalReplicas) -> None:
        for timeout in (None, 30.0, 20.0):
            options = RequestOptions(timeout=timeout)
            request = msgspec.structs.replace(add([1, 2], params), options=options)
            await receive(await fleet.submit(request))
        marks = {request_key(request) for request in replicas.requests}
        seeds = {request.params.seed for request in replicas.requests if request.params}
        assert (len(marks), len(seeds), len(replicas.requests)) == (1, 3, 3)
        assert request_key(add([1, 2], replace(params, seed=1))) not in marks

    run(test)
