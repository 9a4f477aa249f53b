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
from headrace.server.generation import check_stream, given_fields, limit_thinking, sampling_params
from headrace.server.http_exchange import SSE_DONE, HttpExchange, sse_event
from headrace.server.logprobs import LogprobWriter, prompt_logprobs
from headrace.server.openai_records import ChatRequest
from headrace.server.output_parsers.openai import (
    ChatMessageBuilder,
    chat_delta,
    chat_finish_reason,
)
from headrace.server.state import ServerState, Truncation


async def chat_completions(http: HttpExchange, state: ServerState) -> None:
    """Generate the next message of a conversation, with one response or a stream of events."""
    request = await http.read(ChatRequest)
    check_stream(request)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")

    async with generate(http, state, _conversation(state, request)) as generation:
        response = _Response(request, generation, state.tokenizer)
        if request.stream:
            await http.stream_events(response.events(), state.settings.keepalive_seconds)
        else:
            await http.respond(await http.while_connected(response.body()))


def _conversation(state: ServerState, request: ChatRequest) -> Conversation:
    messages = [msgspec.to_builtins(message) for message in request.messages]
    tools, tool_choice = _tools(request)
    params = sampling_params(
        request,
        state.advised_sampling,
        strict_schemas=state.settings.strict_schemas,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    template_kwargs = given_fields(request, ("verbosity", "enable_thinking"))
    return Conversation(
        model=request.model,
        messages=messages,
        params=limit_thinking(params, state.output_format, request),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False and not request.functions,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        chat_template_kwargs=template_kwargs | (request.chat_template_kwargs or {}),
        chat_template=state.named_template(request.chat_template),
        reasoning_effort=request.reasoning_effort,
        thinking=request.thinking,
        include_reasoning=request.include_reasoning is not False,
        max_tokens_field=(
            "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        ),
        truncation=Truncation(request.truncate_prompt_tokens, request.truncation_side),
        stream_interval=request.stream_interval if request.stream else None,
        options=RequestOptions(priority=request.priority or 0, cache_salt=request.cache_salt),
    )


def _tools(
    request: ChatRequest,
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """Return `tools` and `tool_choice`, converted from `functions` and `function_call`."""
    if request.functions is None:
        if request.function_call is not None:
            raise invalid("function_call needs functions; use tools and tool_choice", "functions")
        return request.tools, request.tool_choice
    if request.tools is not None:
        raise invalid("functions and tools are two forms of one field; send tools", "functions")
    tools = [{"type": "function", "function": function} for function in request.functions]
    choice = request.function_call
    if isinstance(choice, dict):
        return tools, {"type": "function", "function": choice}
    return tools, choice


class _Response:
    def __init__(self, request: ChatRequest, generation: Generation, tokenizer: Tokenizer) -> None:
        self._request = request
        self._generation = generation
        self._writer = LogprobWriter(
            tokenizer,
            request.top_logprobs or 0,
            as_ids=bool(request.return_tokens_as_token_ids),
            named=request.logprob_token_ids,
        )
        self._as_function = request.functions is not None
        """Whether a tool call has the form before `tool_calls`."""
        self._echo = _echo(request)
        self._head = {
            "id": f"chatcmpl-{request.request_id or uuid4().hex}",
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
                choice["finish_reason"] = self._reason(chunk, message.has_tool_calls)
                choice["stop_reason"] = chunk.stop_reason

        for choice, message in zip(choices, messages, strict=True):
            choice["message"] = self._message(message)
            choice["logprobs"] = self._scores(choice["logprobs"])
            if not self._request.return_token_ids:
                del choice["token_ids"]
        body = self._head | {
            "object": "chat.completion",
            "choices": choices,
            "usage": self._generation.usage.as_json(),
            "timing": self._generation.timer.timing,
        }
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._generation.prompt_token_ids
        if (scores := self._generation.prompt_logprobs) is not None:
            body["prompt_logprobs"] = prompt_logprobs(scores)
        return body

    def _message(self, builder: ChatMessageBuilder) -> dict[str, Any]:
        message = builder.as_json()
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        if self._as_function and (calls := message.pop("tool_calls", None)):
            message["function_call"] = calls[0]["function"]
        return message

    def _reason(self, chunk: OutputChunk, has_tool_calls: bool) -> str | None:
        reason = chat_finish_reason(chunk.finish_reason, has_tool_calls)
        return "function_call" if reason == "tool_calls" and self._as_function else reason

    async def events(self) -> AsyncGenerator[bytes]:
        n = self._generation.n
        started, has_tool_calls = [False] * n, [False] * n
        try:
            async for chunk in self._generation.chunks():
                index = chunk.index
                if not started[index]:
                    started[index] = True
                    yield self._event(index, {"role": "assistant", "content": self._echo})

                # The first delta of a step carries the step's tokens and log-probabilities.
                scored: OutputChunk | None = chunk
                for delta in map(chat_delta, chunk.deltas):
                    if calls := delta.get("tool_calls"):
                        has_tool_calls[index] = True
                        if self._as_function and calls[0]["index"]:
                            continue  # this form has one call
                        if self._as_function:
                            delta = {"function_call": calls[0]["function"]}
                    yield self._event(index, delta, scored)
                    scored = None
                if scored and (chunk.logprobs or self._request.return_token_ids):
                    yield self._event(index, {"content": ""}, scored)

                if chunk.finish_reason:
                    reason = self._reason(chunk, has_tool_calls[index])
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
        if self._request.return_token_ids and "role" in delta:
            body["prompt_token_ids"] = self._generation.prompt_token_ids
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
                "timing": self._generation.timer.timing,
            }
        )

    def _scores(self, entries: list[Logprobs]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return {"content": self._writer.chat(entries), "refusal": None}


def _echo(request: ChatRequest) -> str:
    """The text of the last message, if the request asks to repeat what it lets continue."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    if isinstance(last.content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in last.content]
        return "\n".join(text for text in texts if isinstance(text, str))
    return last.content if isinstance(last.content, str) else ""
