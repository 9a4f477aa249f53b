"""Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import json
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import msgspec

from headrace.errors import RequestError
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.server.anthropic_content import AnthropicChat
from headrace.server.anthropic_records import (
    AnthropicToolChoice,
    CountTokensRequest,
    MessagesRequest,
)
from headrace.server.conversation import (
    Conversation,
    Generation,
    count_prompt_tokens,
    generate,
)
from headrace.server.errors import anthropic_body, as_api_error, invalid, request_error
from headrace.server.generation import given_fields
from headrace.server.http_exchange import HttpExchange, named_sse_event
from headrace.server.output_parsers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from headrace.server.response_format import response_format
from headrace.server.state import ServerState
from headrace.structured_outputs import StructuredOutputs

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
"""Anthropic's names by OpenAI's finish reasons."""
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's names by Anthropic's."""


async def messages(http: HttpExchange, state: ServerState) -> None:
    """Generate the next message of a conversation, with one response or a stream of events."""
    request = await http.read(MessagesRequest)
    params = _sampling_params(state, request)
    async with generate(http, state, _conversation(request, params)) as generation:
        response = _Response(generation)
        if request.stream:
            await http.stream_events(response.events(), state.settings.keepalive_seconds)
        else:
            await http.respond(await http.while_connected(response.body()))


async def count_tokens(http: HttpExchange, state: ServerState) -> None:
    """Number of tokens in the prompt that a conversation renders to."""
    request = await http.read(CountTokensRequest)
    conversation = _conversation(request, SamplingParams())
    await http.respond({"input_tokens": await count_prompt_tokens(http, state, conversation)})


def _sampling_params(state: ServerState, request: MessagesRequest) -> SamplingParams:
    options = {
        **state.advised_sampling,
        **given_fields(request, ("temperature", "top_p", "top_k")),
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "structured_outputs": _text_format(request, state.settings.strict_schemas),
    }
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise request_error(str(error).replace("stop ", "stop_sequences ")) from None


def _text_format(request: MessagesRequest, strict: bool) -> StructuredOutputs | None:
    config = request.output_config
    found = {
        "output_config.format": config.format if config else None,
        "output_format": request.output_format,
    }
    given = {field: value for field, value in found.items() if value is not None}
    if len(given) > 1:
        raise invalid("output_config.format and output_format are one field; give one of them")
    for field, value in given.items():
        return response_format(msgspec.to_builtins(value), field, f"{field}.schema", strict)
    return None


def _conversation(request: CountTokensRequest, params: SamplingParams) -> Conversation:
    chat = AnthropicChat(request)
    choice, thinking = request.tool_choice, request.thinking
    effort = request.output_config.effort if request.output_config else None
    if thinking and thinking.type == "disabled":
        effort = "none"
    cache_salt = request.cache_salt if isinstance(request, MessagesRequest) else None
    return Conversation(
        model=request.model,
        messages=chat.messages,
        places=chat.places,
        params=params,
        tools=chat.tools,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        continue_final_message=request.messages[-1].role == "assistant",
        schema_field="input_schema",
        reasoning_effort=effort,
        thinking=thinking,
        chat_template_kwargs=request.chat_template_kwargs,
        options=RequestOptions(cache_salt=cache_salt),
    )


def _tool_choice(choice: AnthropicToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _TOOL_CHOICES[choice.type]


class _Response:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._id = f"msg_{uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    async def body(self) -> dict[str, Any]:
        async for chunk in self._generation.chunks():
            for delta in chunk.deltas:
                self._add(delta)
            if chunk.finish_reason:
                self._finish(chunk.finish_reason, chunk.stop_reason)
        blocks = zip(self._blocks, self._texts, strict=True)
        return self._message([_complete(block, "".join(texts)) for block, texts in blocks])

    async def events(self) -> AsyncGenerator[bytes]:
        try:
            yield named_sse_event("message_start", {"message": self._message([])})
            async for chunk in self._generation.chunks():
                for delta in chunk.deltas:
                    for event in self._delta_events(delta):
                        yield event
                if chunk.finish_reason:
                    self._finish(chunk.finish_reason, chunk.stop_reason)
            if self._blocks:
                for event in self._stop_events(len(self._blocks) - 1):
                    yield event
            stop = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
            yield named_sse_event("message_delta", {"delta": stop, "usage": self._usage()})
            yield named_sse_event("message_stop", {})
        except Exception as error:
            yield named_sse_event("error", anthropic_body(as_api_error(error)))

    def _delta_events(self, delta: Delta) -> list[bytes]:
        events = []
        num_blocks = len(self._blocks)
        self._add(delta)
        if len(self._blocks) > num_blocks:
            if num_blocks:
                events += self._stop_events(num_blocks - 1)
            start = {"index": num_blocks, "content_block": self._blocks[-1]}
            events.append(named_sse_event("content_block_start", start))
        if not isinstance(delta, ToolCallStart):
            fields = {"index": len(self._blocks) - 1, "delta": _delta_json(delta)}
            events.append(named_sse_event("content_block_delta", fields))
        return events

    def _stop_events(self, index: int) -> list[bytes]:
        events = [named_sse_event("content_block_stop", {"index": index})]
        if self._blocks[index]["type"] == "thinking":
            # Clients keep the signature and send it back; here nothing is signed.
            delta = {"type": "signature_delta", "signature": ""}
            events.insert(
                0, named_sse_event("content_block_delta", {"index": index, "delta": delta})
            )
        return events

    def _add(self, delta: Delta) -> None:
        last_type = self._blocks[-1]["type"] if self._blocks else ""
        match delta:
            case ToolCallStart():
                self._open({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
                return
            case Content() if last_type != "text":
                self._open({"type": "text", "text": ""})
            case Reasoning() if last_type != "thinking":
                self._open({"type": "thinking", "thinking": "", "signature": ""})
        self._texts[-1].append(delta.text)

    def _open(self, block: dict[str, Any]) -> None:
        self._blocks.append(block)
        self._texts.append([])

    def _finish(self, reason: str, stop: int | str | None) -> None:
        has_tool_calls = any(block["type"] == "tool_use" for block in self._blocks)
        if reason == "stop" and isinstance(stop, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", stop
        elif reason == "stop" and has_tool_calls:
            self._stop_reason = "tool_use"
        else:
            self._stop_reason = _STOP_REASONS.get(reason)

    def _usage(self) -> dict[str, int]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "output_tokens": usage.completion,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
        }

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }


def _complete(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return block | {block["type"]: text}
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):  # invalid or cut off: passed on as the model wrote it
        arguments = {"": text}
    return block | {"input": arguments}


def _delta_json(delta: Content | Reasoning | ToolCallArguments) -> dict[str, str]:
    match delta:
        case Content():
            return {"type": "text_delta", "text": delta.text}
        case Reasoning():
            return {"type": "thinking_delta", "thinking": delta.text}
    return {"type": "input_json_delta", "partial_json": delta.text}
