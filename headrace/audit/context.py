"""One API of one server under audit: its requests, and the crowd of other requests."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.audit.answers import Answer, streamed_answer, whole_answer
from headrace.audit.bodies import Body
from headrace.audit.client import Client, FailedError, Stream

Fields = Mapping[str, Any]

GREEDY: Fields = {"temperature": 0}
SAMPLED: Fields = {"temperature": 1, "seed": 7}
SUBJECT = "The longest river of Europe rises in a forest, and on its way to the sea"
_NUM_TOP = 5
_STAGGER_SECONDS = 0.05
_TEXTS = (
    "Hello",
    "A water wheel turns",
    "Write three sentences about a mill on a small river in the hills.",
    "One, two, three, four,",
    "The miller opened the gate, and then",
    "Why does the moon have phases? Explain it to a child in two sentences.",
)


@dataclass(frozen=True)
class Api:
    """An API that generates text."""

    name: str
    path: str
    is_chat: bool

    def body(self, prompt: str | Sequence[int]) -> dict[str, Any]:
        """The fields of a prompt; a chat takes no token ids."""
        if self.is_chat:
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}

    @property
    def scores(self) -> Fields:
        """The fields that ask for log-probabilities."""
        if self.is_chat:
            return {"logprobs": True, "top_logprobs": _NUM_TOP}
        return {"logprobs": _NUM_TOP}


APIS = (
    Api("chat", "/v1/chat/completions", True),
    Api("completions", "/v1/completions", False),
)


@dataclass(kw_only=True)
class Context:
    """Requests to one API, of `tokens` output tokens each."""

    client: Client
    api: Api
    model: str
    tokens: int
    crowd: int
    """Requests next to the request under audit."""
    rng: random.Random
    against: Client | None = None
    """A second server, whose answers must be equal."""
    has_scores: bool = True
    """Whether the server gives log-probabilities."""
    first: Answer = field(init=False)
    """The greedy answer to `SUBJECT`, alone."""

    def body(self, prompt: str | Sequence[int], fields: Fields) -> dict[str, Any]:
        """A request; `fields` replace its defaults."""
        scores = self.api.scores if self.has_scores else {}
        return {
            "model": self.model,
            "max_tokens": self.tokens,
            **self.api.body(prompt),
            **scores,
            **fields,
        }

    async def ask(self, fields: Fields = GREEDY, prompt: str | Sequence[int] = SUBJECT) -> Answer:
        """Send one request. Raises NotOfferedError and FailedError."""
        return await self._ask(self.client, fields, prompt)

    async def ask_other(self, client: Client, fields: Fields) -> Answer:
        """Send `SUBJECT` to another server."""
        return await self._ask(client, fields, SUBJECT)

    async def _ask(self, client: Client, fields: Fields, prompt: str | Sequence[int]) -> Answer:
        body = await client.post(self.api.path, self.body(prompt, fields), Body)
        if body.error is not None:
            raise FailedError(f"status 200 with an error: {str(body.error)[:100]}")
        try:
            return whole_answer(body)
        except ValueError as error:
            raise FailedError(str(error)) from None

    async def stream(
        self, fields: Fields = GREEDY, max_events: int | None = None
    ) -> tuple[Answer, Stream]:
        """Send `SUBJECT`, and return the joined answer and its events."""
        body = self.body(
            SUBJECT, {**fields, "stream": True, "stream_options": {"include_usage": True}}
        )
        stream = await self.client.stream(self.api.path, body, max_events)
        try:
            return streamed_answer(stream.events), stream
        except ValueError as error:
            raise FailedError(str(error)) from None

    async def in_crowd(self, subjects: Sequence[Fields]) -> list[Answer]:
        """Send several requests at once, among `crowd` others of different lengths.

        Half of the others start earlier, and half later. Errors of the others do not count.
        """
        before = self.crowd // 2
        crowd = [asyncio.create_task(self._other(number)) for number in range(before)]
        await asyncio.sleep(_STAGGER_SECONDS)
        tasks = [asyncio.create_task(self.ask(fields)) for fields in subjects]
        await asyncio.sleep(_STAGGER_SECONDS)
        crowd += [asyncio.create_task(self._other(number)) for number in range(before, self.crowd)]
        try:
            found = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*crowd, return_exceptions=True)
        finally:
            for task in (*tasks, *crowd):
                task.cancel()
        answers = []
        for item in found:
            if isinstance(item, BaseException):
                raise item
            answers.append(item)
        return answers

    async def _other(self, number: int) -> None:
        text = _TEXTS[number % len(_TEXTS)]
        prompt = " ".join([f"{self.rng.randrange(1000)}:"] + [text] * (1 + 2 * (number % 3)))
        fields = {
            "temperature": number % 2,
            "max_tokens": self.tokens // 2 + self.tokens * (number % 4) // 2,
        }
        await self.ask(fields, prompt)
