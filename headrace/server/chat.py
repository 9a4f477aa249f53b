"""`POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator
from time import time
from typing import Any
from uuid import uuid4

import msgspec

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.outputs import Logprobs
from headrace.request import RequestOptions
from headrace.server.asgi_app import sse_error
from headrace.server.conversation import Conversation, Generation, OutputChunk, generate
from headrace.server.errors import invalid
from headrace.server.generation import sampling_params
from headrace.server.http_exchange import SSE_DONE, HttpExchange, sse_event
from headrace.server.logprobs import chat_logprobs
from headrace.server.openai_records import ChatRequest
from headrace.server.output_parsers.openai import (
    ChatMessageBuilder,
    chat_delta,
    chat_finish_reason,
)
from headrace.server.state import ServerState


async def chat_completions(http: HttpExchange, state: ServerState) -> None:
    """Generate the next message of a conversation, with one response or a stream of events."""
    request = await http.read(ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")

    async with generate(http, state, _conversation(state, request)) as generation:
        response = _Response(request, generation, state.tokenizer)
        if request.stream:
            await http.stream_events(response.events(), state.settings.keepalive_seconds)
        else:
            await http.respond(await http.while_connected(response.body()))


def _conversation(state: ServerState, request: ChatRequest) -> Conversation:
    messages = [msgspec.to_builtins(message) for message in request.messages]
    params = sampling_params(
        request,
        state.advised_sampling,
        strict_schemas=state.settings.strict_schemas,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    return Conversation(
        model=request.model,
        messages=messages,
        params=params,
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        chat_template_kwargs=request.chat_template_kwargs,
        chat_template=state.named_template(request.chat_template),
        reasoning_effort=request.reasoning_effort,
        options=RequestOptions(priority=request.priority or 0, cache_salt=request.cache_salt),
    )


class _Response:
    def __init__(self, request: ChatRequest, generation: Generation, tokenizer: Tokenizer) -> None:
        self._request = request
        self._generation = generation
        self._tokenizer = tokenizer
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time()),
            "model": generation.model,
        }
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._always_with_usage = bool(options and options.continuous_usage_stats)

    async def body(self) -> dict[str, Any]:
        n = self._generation.n
        messages = [ChatMessageBuilder() for _ in range(n)]
        choices: list[dict[str, Any]] = [
            {"index": i, "token_ids": [], "logprobs": []} for i in range(n)
        ]
        async for chunk in self._generation.chunks():
            choice, message = choices[chunk.index], messages[chunk.index]
            message.add(chunk.deltas)
            choice["token_ids"] += chunk.token_ids
            choice["logprobs"] += chunk.logprobs
            if chunk.finish_reason:
                reason = chat_finish_reason(chunk.finish_reason, message.has_tool_calls)
                choice["finish_reason"] = reason
                choice["stop_reason"] = chunk.stop_reason

        for choice, message in zip(choices, messages, strict=True):
            choice["message"] = message.as_json()
            choice["logprobs"] = self._scores(choice["logprobs"])
            if not self._request.return_token_ids:
                del choice["token_ids"]
        return self._head | {
            "object": "chat.completion",
            "choices": choices,
            "usage": self._generation.usage.as_json(),
            "timing": self._generation.timing,
        }

    async def events(self) -> AsyncGenerator[bytes]:
        n = self._generation.n
        started, has_tool_calls = [False] * n, [False] * n
        try:
            async for chunk in self._generation.chunks():
                index = chunk.index
                if not started[index]:
                    started[index] = True
                    yield self._event(index, {"role": "assistant", "content": ""})

                # The first delta of a step carries the step's tokens and log-probabilities.
                scored: OutputChunk | None = chunk
                for delta in map(chat_delta, chunk.deltas):
                    has_tool_calls[index] |= "tool_calls" in delta
                    yield self._event(index, delta, scored)
                    scored = None
                if scored and chunk.logprobs:
                    yield self._event(index, {"content": ""}, scored)

                if chunk.finish_reason:
                    reason = chat_finish_reason(chunk.finish_reason, has_tool_calls[index])
                    yield self._event(
                        index, {}, finish_reason=reason, stop_reason=chunk.stop_reason
                    )
            if self._with_usage:
                yield self._usage_event()
            yield SSE_DONE
        except Exception as error:
            yield sse_error(error)

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        scored: OutputChunk | None = None,
        *,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._scores(scored.logprobs) if scored else None,
            "finish_reason": finish_reason,
        }
        if scored and self._request.return_token_ids:
            choice["token_ids"] = scored.token_ids
        if finish_reason:
            choice["stop_reason"] = stop_reason
        body = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        if self._with_usage:
            usage = self._generation.usage
            body["usage"] = usage.as_json() if self._always_with_usage else None
        return sse_event(body)

    def _usage_event(self) -> bytes:
        return sse_event(
            self._head
            | {
                "object": "chat.completion.chunk",
                "choices": [],
                "usage": self._generation.usage.as_json(),
                "timing": self._generation.timing,
            }
        )

    def _scores(self, entries: list[Logprobs]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(entries, self._request.top_logprobs or 0, self._tokenizer)
