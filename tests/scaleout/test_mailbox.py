"""What an engine says in its thread reaches the streams of an event loop, all that is there at
once.
"""

import asyncio
from threading import Thread

from headrace.remote import frames
from headrace.scaleout.mailbox import Mailroom


def news(request: str, text: str, index: int = 0) -> frames.StepOutput:
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


def in_thread(mail: Mailroom, *events: frames.Event) -> None:
    thread = Thread(target=lambda: [mail.put(event) for event in events])
    thread.start()
    thread.join()


def test_what_a_step_brings_to_a_request_is_read_at_once() -> None:
    async def run() -> list[list[frames.Event]]:
        mail = Mailroom()
        mail.open("a")
        in_thread(
            mail,
            frames.Accepted("a"),
            news("a", "one "),
            news("b", "not read"),
            news("a", "two "),
            news("a", "else", 1),
        )
        read = aiter(mail.read("a"))
        first = await anext(read)
        in_thread(mail, news("a", "three"), ended("a"))
        return [first, *[events async for events in read]]

    first, second = asyncio.run(run())
    assert first[0] == frames.Accepted("a")
    assert [
        (one.index, one.text, len(one.token_ids))
        for one in first[1:]
        if isinstance(one, frames.StepOutput)
    ] == [
        (0, "one two ", 2),
        (1, "else", 1),
    ]
    assert [type(one) for one in second] == [frames.StepOutput, frames.Ended]


def test_streams_of_many_threads_get_their_own_in_order() -> None:
    names = [f"request-{number}" for number in range(20)]

    async def read(mail: Mailroom, name: str) -> str:
        return "".join(
            [
                one.text
                async for events in mail.read(name)
                for one in events
                if isinstance(one, frames.StepOutput)
            ]
        )

    async def run() -> list[str]:
        mail = Mailroom()
        for name in names:
            mail.open(name)
        threads = [
            Thread(
                target=lambda name=name: [mail.put(news(name, f"{name}:{n} ")) for n in range(200)]
            )
            for name in names
        ]
        for thread in threads:
            thread.start()
        reading = asyncio.gather(*(read(mail, name) for name in names))
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        for name in names:
            mail.put(ended(name))
        return await reading

    assert asyncio.run(run()) == ["".join(f"{name}:{n} " for n in range(200)) for name in names]


def test_what_comes_of_a_closed_request_is_dropped_and_a_closed_loop_is_no_matter() -> None:
    async def run() -> Mailroom:
        mail = Mailroom()
        mail.open("a")
        mail.close("a")
        in_thread(mail, news("a", "late"), ended("a"))
        await asyncio.sleep(0)
        mail.open("a")
        in_thread(mail, frames.Refused("a", "request", "no"))
        assert [events async for events in mail.read("a")] == [
            [frames.Refused("a", "request", "no")]
        ]
        return mail

    mail = asyncio.run(run())
    mail.put(ended("a"))
