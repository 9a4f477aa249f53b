"""`POST /v1/completions`: plain text, or token ids, continued."""

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from time import time
from typing import Any
from uuid import uuid4

from headrace.prompts import TokenizedPrompt
from headrace.remote import frames
from headrace.remote.stream import Stream
from headrace.request import Logprobs, RequestOptions, token_ids
from headrace.server.asgi import DONE, Call, event
from headrace.server.described import MAX_PROMPTS
from headrace.server.errors import ApiError, invalid
from headrace.server.gate import stream_error
from headrace.server.generation import (
    Choice,
    Clock,
    Usage,
    completion_logprobs,
    finish_reason,
    sampling_params,
)
from headrace.server.openai_records import CompletionRequest
from headrace.server.served_model import ServedModel, merge

_MAX_TOKENS = 16
"""Of an answer that says nothing of its length, as OpenAI has it."""


async def completions(served: ServedModel, call: Call) -> None:
    """Continue one prompt or several, whole or as a stream."""
    asked = await call.read(CompletionRequest)
    adapter = served.adapter_of(asked.model)
    if asked.suffix:
        raise ApiError(400, "unsupported_parameter", "suffix is not supported", param="suffix")
    if asked.stream and asked.echo and asked.logprobs is not None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "log-probabilities of an echoed prompt are not streamed",
            param="stream",
        )
    texts = prompts_of(asked.prompt, "prompt")
    scored = (
        {"prompt_logprobs": asked.logprobs} if asked.echo and asked.logprobs is not None else {}
    )
    params = sampling_params(
        asked, served.advised_sampling, asked.max_tokens or _MAX_TOKENS, asked.logprobs, **scored
    )
    with served.admitted(call, params.n * len(texts)):
        prompts = await read_prompts(
            served, "prompt", texts, asked.add_special_tokens, params.max_tokens
        )
        options = RequestOptions(
            priority=asked.priority or 0, cache_salt=asked.cache_salt, adapter=adapter
        )
        async with served.submitted(call, prompts, params, options) as streams:
            answer = _Answer(served, asked, adapter or served.settings.model_name, prompts)
            if asked.stream:
                await call.stream(answer.chunks(streams), served.settings.keepalive_seconds)
            else:
                await call.respond(await call.while_connected(answer.whole(streams)))


def prompts_of(given: str | Sequence[str | int | list[int]], name: str) -> list[str | list[int]]:
    """The prompts in one of the four forms that OpenAI's clients send. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(one, int) for one in given):
        return [[one for one in given if isinstance(one, int)]]
    if not given or len(given) > MAX_PROMPTS:
        raise invalid(f"{name} must have from 1 to {MAX_PROMPTS} prompts, not {len(given):,}", name)
    if any(isinstance(one, int) for one in given):
        raise invalid(f"{name} mixes token ids and prompts", name)
    return [one for one in given if not isinstance(one, int)]


async def read_prompts(
    served: ServedModel,
    name: str,
    texts: Sequence[str | list[int]],
    add_special: bool | None,
    max_tokens: int | None,
) -> list[list[int]]:
    """The tokens of each prompt of the field `name`. Raises ApiError."""
    return [
        await served.tokens_of(partial(_read, served, text, add_special), name, max_tokens)
        for text in texts
    ]


def _read(served: ServedModel, text: str | list[int], add_special: bool | None) -> TokenizedPrompt:
    if isinstance(text, list):
        too_many = "{name} has {count} token ids, more than a context of {limit:,} tokens can hold"
        return TokenizedPrompt(
            token_ids("the prompt", text, served.prompts.max_model_len, too_many), None
        )
    return served.prompts.read_prompt(text, add_special=add_special is not False)


class _Answer:
    """The answer to one request: `n` choices for each prompt."""

    def __init__(
        self, served: ServedModel, asked: CompletionRequest, model: str, prompts: list[list[int]]
    ) -> None:
        self._service = served
        self._asked = asked
        self._prompts = prompts
        self._n = asked.n or 1
        self._head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time()),
            "model": model,
        }
        self._usage = Usage(sum(map(len, prompts)))
        self._clocks = [Clock(served.metrics) for _ in prompts]
        self._echoed = [served.tokenizer.decode(prompt) if asked.echo else "" for prompt in prompts]
        self._ends: list[frames.Ended | None] = [None] * len(prompts)

    async def whole(self, streams: list[Stream]) -> dict[str, Any]:
        """The answer as one object. Raises what it failed of."""
        choices = [Choice() for _ in range(self._n * len(self._prompts))]
        async for number, item in merge(streams):
            if isinstance(item, frames.News):
                self._count(number, item)
                choices[self._index(number, item)].add(item)
            else:
                self._end(number, item)
        answers = [self._choice(i, choice) for i, choice in enumerate(choices)]
        return self._head | {
            "choices": answers,
            "usage": self._usage.as_json(),
            "timing": self._clocks[0].timing,
        }

    async def chunks(self, streams: list[Stream]) -> AsyncGenerator[bytes]:
        """The answer as it comes. An error is its last event."""
        options = self._asked.stream_options
        with_usage, always = (
            bool(options and options.include_usage),
            bool(options and options.continuous_usage_stats),
        )
        offsets = [len(self._echoed[i // self._n]) for i in range(self._n * len(self._prompts))]
        begun = [False] * len(offsets)
        try:
            async for number, item in merge(streams):
                if isinstance(item, frames.Ended):
                    self._end(number, item)
                    continue
                self._count(number, item)
                index, reason = self._index(number, item), finish_reason(item)
                text = item.text if begun[index] else self._echoed[number] + item.text
                begun[index] = True
                choice: dict[str, Any] = {
                    "index": index,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": reason,
                }
                if self._asked.logprobs is not None:
                    scores = completion_logprobs(
                        item.logprobs,
                        item.token_ids,
                        self._asked.logprobs,
                        offsets[index],
                        self._service.tokenizer,
                    )
                    choice["logprobs"] = scores
                    offsets[index] += sum(map(len, scores["tokens"]))
                if reason:
                    choice["stop_reason"] = item.stop_reason
                if self._asked.return_token_ids:
                    choice["token_ids"] = item.token_ids
                chunk = self._head | {"choices": [choice]}
                if with_usage:
                    chunk["usage"] = self._usage.as_json() if always else None
                yield event(chunk)
            if with_usage:
                yield event(
                    self._head
                    | {
                        "choices": [],
                        "usage": self._usage.as_json(),
                        "timing": self._clocks[0].timing,
                    }
                )
            yield DONE
        except Exception as error:
            yield stream_error(error)

    def _index(self, number: int, news: frames.News) -> int:
        return number * self._n + news.index

    def _count(self, number: int, news: frames.News) -> None:
        self._usage.completion += len(news.token_ids)
        self._clocks[number].tokens(len(news.token_ids))

    def _end(self, number: int, item: frames.Ended) -> None:
        self._clocks[number].ended(item)
        self._usage.cached += item.cached_tokens
        self._ends[number] = item

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        number, top = index // self._n, self._asked.logprobs
        scores = None
        if top is not None:
            entries: list[Logprobs | None] = [*choice.logprobs]
            tokens, ended = choice.token_ids, self._ends[number]
            offset = len(self._echoed[number])
            if self._asked.echo and ended and ended.prompt_logprobs:
                entries, tokens, offset = (
                    [*ended.prompt_logprobs, *entries],
                    [*self._prompts[number], *tokens],
                    0,
                )
            scores = completion_logprobs(entries, tokens, top, offset, self._service.tokenizer)
        return {
            "index": index,
            "text": self._echoed[number] + choice.text,
            "logprobs": scores,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        } | ({"token_ids": choice.token_ids} if self._asked.return_token_ids else {})
