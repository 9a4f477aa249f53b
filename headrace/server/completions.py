"""`POST /v1/completions`."""

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from time import time
from typing import Any, Unpack
from uuid import uuid4

from headrace.outputs import Logprobs
from headrace.prompts import TextOptions, TokenizedPrompt
from headrace.remote import frames
from headrace.remote.stream import Stream
from headrace.request import RequestOptions
from headrace.server.asgi_app import sse_error
from headrace.server.errors import ApiError, invalid
from headrace.server.field_types import MAX_PROMPTS
from headrace.server.generation import (
    Choice,
    RequestTimer,
    Usage,
    finish_reason,
    sampling_params,
)
from headrace.server.http_exchange import SSE_DONE, HttpExchange, sse_event
from headrace.server.logprobs import completion_logprobs
from headrace.server.openai_records import CompletionRequest
from headrace.server.state import ServerState, merge_streams
from headrace.validation import token_ids

_DEFAULT_MAX_TOKENS = 16


async def completions(http: HttpExchange, state: ServerState) -> None:
    """Continue one or several prompts, with one response or a stream of events."""
    request = await http.read(CompletionRequest)
    adapter = state.resolve_adapter(request.model)
    _check(request)
    texts = prompt_list(request.prompt, "prompt")
    scores_prompt = request.echo and request.logprobs is not None
    params = sampling_params(
        request,
        state.advised_sampling,
        strict_schemas=state.settings.strict_schemas,
        max_tokens=request.max_tokens or _DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if scores_prompt else None,
    )

    with state.admit(http, params.n * len(texts)):
        prompts = await tokenize_prompts(
            state,
            texts,
            "prompt",
            add_special_tokens=request.add_special_tokens is not False,
            parse_special=request.parse_special is not False,
            max_tokens=params.max_tokens,
        )
        options = RequestOptions(
            priority=request.priority or 0, cache_salt=request.cache_salt, adapter=adapter
        )
        async with state.submit(http, prompts, params, options) as streams:
            model = adapter or state.settings.model_name
            response = _Response(state, request, model, prompts, texts)
            if request.stream:
                await http.stream_events(response.events(streams), state.settings.keepalive_seconds)
            else:
                await http.respond(await http.while_connected(response.body(streams)))


def _check(request: CompletionRequest) -> None:
    if request.suffix:
        raise ApiError(400, "unsupported_parameter", "suffix is not supported", param="suffix")
    if request.stream and request.echo and request.logprobs is not None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "stream cannot be combined with echo and logprobs; leave one out",
            param="stream",
        )


def prompt_list(prompt: str | Sequence[str | int | list[int]], param: str) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if ids and not prompts:
        return [ids]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise invalid(f"{param} must have 1 to {MAX_PROMPTS} prompts, not {len(prompt):,}", param)
    if ids:
        raise invalid(f"{param} must not mix texts and token ids", param)
    return prompts


async def tokenize_prompts(
    state: ServerState,
    prompts: Sequence[str | list[int]],
    param: str,
    *,
    max_tokens: int | None,
    **text_options: Unpack[TextOptions],
) -> list[list[int]]:
    return [
        await state.tokenize(partial(_tokenize, state, prompt, text_options), param, max_tokens)
        for prompt in prompts
    ]


def _tokenize(
    state: ServerState, prompt: str | list[int], text_options: TextOptions
) -> TokenizedPrompt:
    if isinstance(prompt, str):
        return state.prompt_reader.read_prompt(prompt, **text_options)
    too_many = "{name} has {count} token ids, more than a context of {limit:,} tokens can hold"
    max_model_len = state.prompt_reader.max_model_len
    return TokenizedPrompt(token_ids("the prompt", prompt, max_model_len, too_many), None)


class _Response:
    def __init__(
        self,
        state: ServerState,
        request: CompletionRequest,
        model: str,
        prompts: list[list[int]],
        texts: Sequence[str | list[int]],
    ) -> None:
        """`texts` are the prompts as they came: texts, or the token ids in `prompts`."""
        self._tokenizer = state.tokenizer
        self._request = request
        self._prompts = prompts
        self._n = request.n or 1
        self._head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time()),
            "model": model,
        }
        self._usage = Usage(sum(map(len, prompts)))
        self._timers = [RequestTimer(state.metrics) for _ in prompts]
        self._echoes = [""] * len(prompts)
        if request.echo:
            self._echoes = [
                text if isinstance(text, str) else state.tokenizer.decode(text) for text in texts
            ]
        self._ended: list[frames.Ended | None] = [None] * len(prompts)

    async def body(self, streams: list[Stream]) -> dict[str, Any]:
        choices = [Choice() for _ in range(self._n * len(self._prompts))]
        async for number, item in merge_streams(streams):
            if isinstance(item, frames.Ended):
                self._end(number, item)
            else:
                self._count(number, item)
                choices[self._index(number, item)].add(item)
        return self._head | {
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": self._usage.as_json(),
            "timing": self._timers[0].timing,
        }

    async def events(self, streams: list[Stream]) -> AsyncGenerator[bytes]:
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        always_with_usage = bool(options and options.continuous_usage_stats)
        num_choices = self._n * len(self._prompts)
        offsets = [len(self._echoes[i // self._n]) for i in range(num_choices)]
        started = [False] * num_choices
        try:
            async for number, item in merge_streams(streams):
                if isinstance(item, frames.Ended):
                    self._end(number, item)
                    continue
                self._count(number, item)
                index = self._index(number, item)
                echo = "" if started[index] else self._echoes[number]
                started[index] = True
                choice = self._delta(index, item, echo, offsets)
                chunk = self._head | {"choices": [choice]}
                if with_usage:
                    chunk["usage"] = self._usage.as_json() if always_with_usage else None
                yield sse_event(chunk)
            if with_usage:
                usage, timing = self._usage.as_json(), self._timers[0].timing
                yield sse_event(self._head | {"choices": [], "usage": usage, "timing": timing})
            yield SSE_DONE
        except Exception as error:
            yield sse_error(error)

    def _delta(
        self, index: int, output: frames.StepOutput, echo: str, offsets: list[int]
    ) -> dict[str, Any]:
        reason, scores = finish_reason(output), None
        if self._request.logprobs is not None:
            scores = completion_logprobs(
                output.logprobs,
                output.token_ids,
                self._request.logprobs,
                offsets[index],
                self._tokenizer,
            )
            offsets[index] += sum(map(len, scores["tokens"]))
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + output.text,
            "logprobs": scores,
            "finish_reason": reason,
        }
        if reason:
            choice["stop_reason"] = output.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        number = index // self._n
        result: dict[str, Any] = {
            "index": index,
            "text": self._echoes[number] + choice.text,
            "logprobs": self._scores(number, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            result["token_ids"] = choice.token_ids
        return result

    def _scores(self, number: int, choice: Choice) -> dict[str, Any] | None:
        num_top, ended = self._request.logprobs, self._ended[number]
        if num_top is None:
            return None
        entries: list[Logprobs | None] = [*choice.logprobs]
        tokens, offset = choice.token_ids, len(self._echoes[number])
        if self._request.echo and ended and ended.prompt_logprobs:
            entries = [*ended.prompt_logprobs, *entries]
            tokens, offset = [*self._prompts[number], *tokens], 0
        return completion_logprobs(entries, tokens, num_top, offset, self._tokenizer)

    def _index(self, number: int, output: frames.StepOutput) -> int:
        return number * self._n + output.index

    def _count(self, number: int, output: frames.StepOutput) -> None:
        self._usage.completion += len(output.token_ids)
        self._timers[number].add_tokens(len(output.token_ids))

    def _end(self, number: int, ended: frames.Ended) -> None:
        self._timers[number].end(ended)
        self._usage.cached += ended.cached_tokens
        self._ended[number] = ended
