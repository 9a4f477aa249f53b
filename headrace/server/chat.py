"""`POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator
from functools import partial
from time import time
from typing import Any
from uuid import uuid4

from headrace.prompts import TokenizedPrompt
from headrace.server import frames
from headrace.server.asgi import DONE, Call, event
from headrace.server.engine_client import Stream
from headrace.server.errors import ApiError, invalid
from headrace.server.gate import stream_error
from headrace.server.generation import Choice, Clock, Usage, chat_logprobs, finish_reason, sampling_params
from headrace.server.openai_records import ChatMessage, ChatRequest
from headrace.server.served_model import ServedModel


async def chat_completions(served: ServedModel, call: Call) -> None:
    """Answer a conversation, whole or as a stream."""
    asked = await call.read(ChatRequest)
    adapter = served.adapter_of(asked.model)
    _check_supported(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    params = sampling_params(asked, served.advised_sampling, asked.max_completion_tokens or asked.max_tokens, logprobs)
    with served.admitted(call, params.n):
        prompt = await served.tokens_of(partial(_read, served, asked), "messages", params.max_tokens)
        salt = served.salt(call, asked.cache_salt)
        async with served.submitted([prompt], params, priority=asked.priority, salt=salt, adapter=adapter) as (stream,):
            answer = _Answer(served, asked, adapter or served.settings.model_name, len(prompt))
            if asked.stream:
                await call.stream(answer.chunks(stream), served.settings.keepalive_seconds)
            else:
                await call.respond(await call.while_connected(answer.whole(stream)))


def messages_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: what is not there is left out, and parts of text are one text. Raises ApiError."""
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(number: int, message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise invalid(f"messages[{number}]: this model reads text only, not {part.type!r}", "messages", "unsupported_parameter")
        content = "\n".join(part.text or "" for part in content)
    fields = {"role": message.role, "content": content if content is not None or message.tool_calls else ""}
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if message.reasoning is not None:
        fields.setdefault("reasoning_content", message.reasoning)
    return fields


def _check_supported(asked: ChatRequest) -> None:
    if asked.tools:
        raise ApiError(400, "unsupported_parameter", "tools are not supported", param="tools")
    if asked.response_format and asked.response_format.get("type") != "text":
        raise ApiError(400, "unsupported_parameter", "response_format must be text", param="response_format")
    if asked.continue_final_message:
        raise ApiError(400, "unsupported_parameter", "continue_final_message is not supported", param="continue_final_message")


def _read(served: ServedModel, asked: ChatRequest) -> TokenizedPrompt:
    return served.prompts.read_chat(
        messages_of(asked.messages),
        documents=asked.documents,
        add_generation_prompt=asked.add_generation_prompt is not False,
        chat_template_kwargs=asked.chat_template_kwargs,
    )


class _Answer:
    """The answer to one conversation."""

    def __init__(self, served: ServedModel, asked: ChatRequest, model: str, prompt_tokens: int) -> None:
        self._service = served
        self._asked = asked
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), "model": model}
        self._usage = Usage(prompt_tokens)
        self._clock = Clock(served.metrics)

    async def whole(self, stream: Stream) -> dict[str, Any]:
        """The answer as one object. Raises what it failed of."""
        choices = [Choice() for _ in range(self._asked.n or 1)]
        async for item in stream:
            if isinstance(item, frames.News):
                self._count(item)
                choices[item.index].add(item)
            else:
                self._end(item)
        return self._head | {
            "object": "chat.completion",
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": self._usage.as_json(),
            "timing": self._clock.timing,
        }

    async def chunks(self, stream: Stream) -> AsyncGenerator[bytes]:
        """The answer as it comes. An error is its last event."""
        options, asked = self._asked.stream_options, self._asked
        with_usage, always = (bool(options and options.include_usage), bool(options and options.continuous_usage_stats))
        begun = [False] * (asked.n or 1)
        try:
            async for item in stream:
                if isinstance(item, frames.Ended):
                    self._end(item)
                    continue
                self._count(item)
                if not begun[item.index]:
                    begun[item.index] = True
                    yield self._chunk(item.index, {"role": "assistant", "content": ""}, None, None, with_usage, always)
                reason = finish_reason(item)
                if item.text or item.logprobs:
                    yield self._chunk(item.index, {"content": item.text}, item, None, with_usage, always)
                if reason:
                    yield self._chunk(item.index, {}, None, reason, with_usage, always, item.stop_reason)
            if with_usage:
                last = {"object": "chat.completion.chunk", "choices": [], "usage": self._usage.as_json(), "timing": self._clock.timing}
                yield event(self._head | last)
            yield DONE
        except Exception as error:
            yield stream_error(error)

    def _count(self, news: frames.News) -> None:
        self._usage.completion += len(news.token_ids)
        self._clock.tokens(len(news.token_ids))

    def _end(self, item: frames.Ended) -> None:
        self._clock.ended(item)
        self._usage.cached = item.cached_tokens

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        top = self._asked.top_logprobs or 0
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs, top, self._service.tokenizer) if self._asked.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        } | ({"token_ids": choice.token_ids} if self._asked.return_token_ids else {})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        news: frames.News | None,
        reason: str | None,
        with_usage: bool,
        always: bool,
        stop_reason: int | str | None = None,
    ) -> bytes:
        top, asked = self._asked.top_logprobs or 0, self._asked
        scored = chat_logprobs(news.logprobs, top, self._service.tokenizer) if news and asked.logprobs else None
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": scored, "finish_reason": reason}
        if reason:
            choice["stop_reason"] = stop_reason
        if asked.return_token_ids and news:
            choice["token_ids"] = news.token_ids
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        if with_usage:
            chunk["usage"] = self._usage.as_json() if always else None
        return event(chunk)
