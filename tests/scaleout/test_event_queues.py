"""Event queues: events of an engine's thread reach the coroutines of an event loop, merged."""

import asyncio
from threading import Thread

from headrace.remote import frames
from headrace.scaleout.event_queues import EventQueues


def output(request: str, text: str, index: int = 0) -> frames.StepOutput:
    return frames.StepOutput(
        id=request,
        index=index,
        text=text,
        token_ids=[1],
        logprobs=[],
        finish_reason=None,
        stop_reason=None,
    )


def ended(request: str) -> frames.Ended:
    return frames.Ended(id=request, prompt_tokens=1)


def in_thread(queues: EventQueues, *events: frames.Event) -> None:
    thread = Thread(target=lambda: [queues.put(event) for event in events])
    thread.start()
    thread.join()


def test_outputs_of_a_step_are_read_at_once() -> None:
    async def run() -> list[list[frames.Event]]:
        queues = EventQueues()
        queues.open("a")
        in_thread(
            queues,
            frames.Accepted("a"),
            output("a", "one "),
            output("b", "not read"),
            output("a", "two "),
            output("a", "else", 1),
        )
        read = aiter(queues.read("a"))
        first = await anext(read)
        in_thread(queues, output("a", "three"), ended("a"))
        return [first, *[events async for events in read]]

    first, second = asyncio.run(run())
    assert first[0] == frames.Accepted("a")
    assert [
        (event.index, event.text, len(event.token_ids))
        for event in first[1:]
        if isinstance(event, frames.StepOutput)
    ] == [
        (0, "one two ", 2),
        (1, "else", 1),
    ]
    assert [type(event) for event in second] == [frames.StepOutput, frames.Ended]


def test_many_threads_keep_the_order_of_each_request() -> None:
    names = [f"request-{number}" for number in range(20)]

    async def read(queues: EventQueues, name: str) -> str:
        return "".join(
            [
                event.text
                async for events in queues.read(name)
                for event in events
                if isinstance(event, frames.StepOutput)
            ]
        )

    async def run() -> list[str]:
        queues = EventQueues()
        for name in names:
            queues.open(name)
        threads = [
            Thread(
                target=lambda name=name: [
                    queues.put(output(name, f"{name}:{n} ")) for n in range(200)
                ]
            )
            for name in names
        ]
        for thread in threads:
            thread.start()
        reading = asyncio.gather(*(read(queues, name) for name in names))
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        for name in names:
            queues.put(ended(name))
        return await reading

    assert asyncio.run(run()) == ["".join(f"{name}:{n} " for n in range(200)) for name in names]


def test_events_of_a_closed_request_or_loop_are_dropped() -> None:
    async def run() -> EventQueues:
        queues = EventQueues()
        queues.open("a")
        queues.close("a")
        in_thread(queues, output("a", "late"), ended("a"))
        await asyncio.sleep(0)
        queues.open("a")
        in_thread(queues, frames.Refused("a", "request", "no"))
        assert [events async for events in queues.read("a")] == [
            [frames.Refused("a", "request", "no")]
        ]
        return queues

    queues = asyncio.run(run())
    queues.put(ended("a"))
