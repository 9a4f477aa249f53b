"""`POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator
from time import time
from typing import Any
from uuid import uuid4

from headrace.request import RequestOptions
from headrace.server.asgi import DONE, Call, event
from headrace.server.conversation import Answer, Asked, Piece, answered
from headrace.server.errors import invalid
from headrace.server.gate import stream_error
from headrace.server.generation import chat_logprobs, sampling_params
from headrace.server.openai_messages import messages_of
from headrace.server.openai_records import ChatRequest
from headrace.server.output_parsers.openai import ChatMessage, chat_delta, chat_finish_reason
from headrace.server.served_model import ServedModel


async def chat_completions(served: ServedModel, call: Call) -> None:
    """Answer a conversation, whole or as a stream."""
    asked = await call.read(ChatRequest)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    async with answered(served, call, _asked(served, asked)) as answer:
        body = _Body(served, asked, answer)
        if asked.stream:
            await call.stream(body.chunks(), served.settings.keepalive_seconds)
        else:
            await call.respond(await call.while_connected(body.whole()))


def _asked(served: ServedModel, asked: ChatRequest) -> Asked:
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    return Asked(
        model=asked.model,
        messages=messages_of(asked.messages),
        params=sampling_params(asked, served.advised_sampling, max_tokens, logprobs),
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        documents=asked.documents,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
        chat_template_kwargs=asked.chat_template_kwargs,
        reasoning_effort=asked.reasoning_effort,
        options=RequestOptions(priority=asked.priority or 0, cache_salt=asked.cache_salt),
    )


class _Body:
    """The response to one request."""

    def __init__(self, served: ServedModel, asked: ChatRequest, answer: Answer) -> None:
        self._tokenizer = served.tokenizer
        self._asked = asked
        self._answer = answer
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time()),
            "model": answer.model,
        }
        options = asked.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Raises what it failed of."""
        messages = [ChatMessage() for _ in range(self._answer.n)]
        choices: list[dict[str, Any]] = [
            {"index": i, "token_ids": [], "logprobs": []} for i in range(self._answer.n)
        ]
        async for piece in self._answer.pieces():
            choice = choices[piece.index]
            messages[piece.index].add(piece.deltas)
            choice["token_ids"] += piece.token_ids
            choice["logprobs"] += piece.logprobs
            if piece.finish_reason:
                choice["finish_reason"] = chat_finish_reason(
                    piece.finish_reason, messages[piece.index].has_calls
                )
                choice["stop_reason"] = piece.stop_reason
        for choice, message in zip(choices, messages, strict=True):
            choice["message"] = message.as_json()
            choice["logprobs"] = self._scores(choice["logprobs"])
            if not self._asked.return_token_ids:
                del choice["token_ids"]
        usage, timing = self._answer.usage.as_json(), self._answer.timing
        return self._head | {
            "object": "chat.completion",
            "choices": choices,
            "usage": usage,
            "timing": timing,
        }

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The answer as it comes. An error is its last event."""
        begun, calls = [False] * self._answer.n, [False] * self._answer.n
        try:
            async for piece in self._answer.pieces():
                if not begun[piece.index]:
                    begun[piece.index] = True
                    yield self._chunk(piece.index, {"role": "assistant", "content": ""})
                scores: Piece | None = piece
                for delta in piece.deltas:
                    calls[piece.index] = calls[piece.index] or "tool_calls" in chat_delta(delta)
                    yield self._chunk(piece.index, chat_delta(delta), scores)
                    scores = None
                if scores and piece.logprobs:
                    yield self._chunk(piece.index, {"content": ""}, scores)
                if piece.finish_reason:
                    yield self._chunk(
                        piece.index,
                        {},
                        None,
                        chat_finish_reason(piece.finish_reason, calls[piece.index]),
                        piece.stop_reason,
                    )
            if self._with_usage:
                last = {
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": self._answer.usage.as_json(),
                }
                yield event(self._head | last | {"timing": self._answer.timing})
            yield DONE
        except Exception as error:
            yield stream_error(error)

    def _scores(self, entries: list[Any]) -> dict[str, Any] | None:
        return (
            chat_logprobs(entries, self._asked.top_logprobs or 0, self._tokenizer)
            if self._asked.logprobs
            else None
        )

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        piece: Piece | None = None,
        reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
        }
        if piece:
            choice["logprobs"] = self._scores(piece.logprobs)
            if self._asked.return_token_ids:
                choice["token_ids"] = piece.token_ids
        if reason:
            choice["stop_reason"] = stop_reason
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = self._answer.usage.as_json() if self._always else None
        return event(chunk)
