"""`POST /v1/completions`."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from operator import itemgetter
from time import time
from typing import Any, Unpack
from uuid import uuid4

import msgspec

from headrace.outputs import Logprobs
from headrace.prompts import TextOptions, TokenizedPrompt
from headrace.remote import frames
from headrace.remote.stream import Stream
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.server.asgi_app import sse_error
from headrace.server.errors import ApiError, invalid
from headrace.server.field_types import MAX_PROMPTS
from headrace.server.generation import (
    Choice,
    RequestTimer,
    StreamInterval,
    Usage,
    check_stream,
    finish_reason,
    limit_thinking,
    sampling_params,
)
from headrace.server.http_exchange import SSE_DONE, HttpExchange, sse_event
from headrace.server.logprobs import LogprobWriter, TextOffsets, prompt_logprobs
from headrace.server.openai_records import CompletionRequest
from headrace.server.state import NO_TRUNCATION, ServerState, Truncation, merge_streams
from headrace.validation import token_ids

_DEFAULT_MAX_TOKENS = 16


async def completions(http: HttpExchange, state: ServerState) -> None:
    """Continue one or several prompts, with one response or a stream of events."""
    request = await http.read(CompletionRequest)
    adapter = state.resolve_adapter(request.model)
    _check(request)
    texts = prompt_list(request.prompt, "prompt")
    params = _sampling_params(state, request)

    with state.admit(http, params.n * len(texts), request.priority or 0):
        prompts = await tokenize_prompts(
            state,
            texts,
            "prompt",
            max_tokens=params.max_tokens,
            truncation=Truncation(request.truncate_prompt_tokens, request.truncation_side),
            add_special_tokens=request.add_special_tokens is not False,
            parse_special=request.parse_special is not False,
        )
        options = RequestOptions(
            priority=request.priority or 0, cache_salt=request.cache_salt, adapter=adapter
        )
        async with state.submit(http, prompts, params, options) as streams:
            model = adapter or state.settings.model_name
            timers = [RequestTimer(state.metrics, http.stopwatch) for _ in prompts]
            response = _Response(state, request, params, model, prompts, texts, timers)
            if request.stream:
                await http.stream_events(response.events(streams), state.settings.keepalive_seconds)
            else:
                await http.respond(await http.while_connected(response.body(streams)))


def _check(request: CompletionRequest) -> None:
    check_stream(request)
    if request.stream and request.echo and request.logprobs is not None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "stream cannot be combined with echo and logprobs; leave one out",
            param="stream",
        )
    if request.best_of is None:
        return
    if request.best_of < (request.n or 1):
        raise invalid(f"best_of must be at least n, which is {request.n}", "best_of")
    if request.stream and request.best_of > (request.n or 1):
        raise invalid("best_of needs whole texts to compare them; leave stream out", "best_of")


def _sampling_params(state: ServerState, request: CompletionRequest) -> SamplingParams:
    prompt_logprobs, logprobs = request.prompt_logprobs, request.logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = logprobs
    num_outputs = max(request.best_of or 1, request.n or 1)
    if logprobs is None and num_outputs > (request.n or 1):
        logprobs = 0
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = sampling_params(
        msgspec.structs.replace(request, n=num_outputs),
        state.advised_sampling,
        strict_schemas=state.settings.strict_schemas,
        max_tokens=max(max_tokens, 1),  # a token that the response leaves out
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return limit_thinking(params, state.output_format, request)


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
    truncation: Truncation = NO_TRUNCATION,
    **text_options: Unpack[TextOptions],
) -> list[list[int]]:
    return [
        await state.tokenize(
            partial(_tokenize, state, prompt, text_options),
            param,
            max_tokens,
            truncation=truncation,
        )
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
        params: SamplingParams,
        model: str,
        prompts: list[list[int]],
        texts: Sequence[str | list[int]],
        timers: Sequence[RequestTimer],
    ) -> None:
        """`texts` are the prompts as they came: texts, or token ids. `timers` are theirs."""
        self._tokenizer = state.tokenizer
        self._request = request
        self._params = params
        self._prompts = prompts
        self._n = params.n
        self._writer = LogprobWriter(
            state.tokenizer,
            request.logprobs or 0,
            as_ids=bool(request.return_tokens_as_token_ids),
            named=request.logprob_token_ids,
        )
        self._head = {
            "id": f"cmpl-{request.request_id or uuid4().hex}",
            "object": "text_completion",
            "created": int(time()),
            "model": model,
        }
        self._usage = Usage(sum(map(len, prompts)))
        self._timers = timers
        self._echoes = [""] * len(prompts)
        if request.echo:
            is_cut = request.truncate_prompt_tokens is not None
            self._echoes = [
                text
                if isinstance(text, str) and not is_cut
                else state.tokenizer.decode(prompt, skip_special=False)
                for text, prompt in zip(texts, prompts, strict=True)
            ]
        self._ended: list[frames.Ended | None] = [None] * len(prompts)

    async def body(self, streams: list[Stream]) -> dict[str, Any]:
        choices = [Choice() for _ in range(self._n * len(self._prompts))]
        async for number, output in self._outputs(streams):
            choices[number * self._n + output.index].add(output)
        kept = [choice for number in range(len(streams)) for choice in self._best(number, choices)]
        n = len(kept) // len(streams)
        return self._head | {
            "choices": [self._choice(i, i // n, choice) for i, choice in enumerate(kept)],
            "usage": self._usage.as_json(),
            "timing": self._timing(),
        }

    def _timing(self) -> dict[str, float]:
        """Of the prompt that took longest."""
        return min((timer.timing for timer in self._timers), key=itemgetter("network"))

    def _best(self, number: int, choices: list[Choice]) -> list[Choice]:
        """The choices of a prompt, by mean log-probability if `best_of` makes more than `n`."""
        mine = choices[number * self._n : (number + 1) * self._n]
        n = self._request.n or 1
        return sorted(mine, key=lambda choice: -choice.mean_logprob)[:n] if n < self._n else mine

    async def events(self, streams: list[Stream]) -> AsyncGenerator[bytes]:
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        always_with_usage = bool(options and options.continuous_usage_stats)
        offsets = [self._offsets(i // self._n) for i in range(self._n * len(self._prompts))]
        interval = StreamInterval(self._request.stream_interval)
        started: set[int] = set()
        try:
            async for number, output in self._outputs(streams):
                index = number * self._n + output.index
                if (ready := interval.push(index, output)) is None:
                    continue
                choice = self._delta(index, ready, offsets[index])
                if index not in started:
                    started.add(index)
                    choice["text"] = self._echoes[number] + choice["text"]
                    self._add_prompt(choice, number)
                chunk = self._head | {"choices": [choice]}
                if with_usage:
                    chunk["usage"] = self._usage.as_json() if always_with_usage else None
                yield sse_event(chunk)
            if with_usage:
                usage, timing = self._usage.as_json(), self._timing()
                yield sse_event(self._head | {"choices": [], "usage": usage, "timing": timing})
            yield SSE_DONE
        except Exception as error:
            yield sse_error(error)

    async def _outputs(self, streams: list[Stream]) -> AsyncIterator[tuple[int, frames.StepOutput]]:
        """Yield outputs with the numbers of their prompts, and count them."""
        async for number, item in merge_streams(streams):
            if isinstance(item, frames.Ended):
                self._timers[number].end(item)
                self._usage.cached += item.cached_tokens
                self._ended[number] = item
                continue
            output = item
            if self._request.max_tokens == 0:
                reason = "length" if item.finish_reason == "stop" else item.finish_reason
                output = msgspec.structs.replace(
                    item,
                    text="",
                    token_ids=[],
                    logprobs=[],
                    finish_reason=reason,
                    stop_reason=None,
                )
            self._usage.completion += len(output.token_ids)
            self._timers[number].add_tokens(output.index, len(output.token_ids))
            yield number, output

    def _delta(self, index: int, output: frames.StepOutput, offsets: TextOffsets) -> dict[str, Any]:
        reason, scores = finish_reason(output), None
        if self._request.logprobs is not None:
            found = offsets.of_output(output.token_ids)
            scores = self._writer.completion(output.logprobs, output.token_ids, found)
        choice: dict[str, Any] = {
            "index": index,
            "text": output.text,
            "logprobs": scores,
            "finish_reason": reason,
        }
        if reason:
            choice["stop_reason"] = output.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _choice(self, index: int, number: int, choice: Choice) -> dict[str, Any]:
        result: dict[str, Any] = {
            "index": index,
            "text": self._echoes[number] + choice.text,
            "logprobs": self._scores(number, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            result["token_ids"] = choice.token_ids
        self._add_prompt(result, number)
        ended = self._ended[number]
        if self._request.prompt_logprobs is not None and ended and ended.prompt_logprobs:
            result["prompt_logprobs"] = prompt_logprobs(ended.prompt_logprobs)
        return result

    def _add_prompt(self, choice: dict[str, Any], number: int) -> None:
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[number]

    def _scores(self, number: int, choice: Choice) -> dict[str, Any] | None:
        ended = self._ended[number]
        if self._request.logprobs is None:
            return None
        entries: list[Logprobs | None] = [*choice.logprobs]
        tokens = choice.token_ids
        offsets = self._offsets(number).of_output(tokens)
        if self._request.echo and ended and ended.prompt_logprobs:
            prompt = self._prompts[number]
            entries = [*ended.prompt_logprobs, *entries]
            in_prompt = TextOffsets(self._tokenizer, 0, skips_special=False)
            offsets = [*in_prompt.of_prompt(prompt, self._echoes[number]), *offsets]
            tokens = [*prompt, *tokens]
        return self._writer.completion(entries, tokens, offsets)

    def _offsets(self, number: int) -> TextOffsets:
        """Offsets of an output's tokens, after the echo."""
        begin, skips = len(self._echoes[number]), self._params.skip_special_tokens
        return TextOffsets(self._tokenizer, begin, skips_special=skips)
