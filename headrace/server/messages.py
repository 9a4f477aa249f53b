"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

import json
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from headrace.errors import RequestError
from headrace.request import SamplingParams
from headrace.server.anthropic_records import (
    AnthropicMessage,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
)
from headrace.server.asgi import Call, named_event
from headrace.server.conversation import Answer, Asked, answered, prompt_tokens
from headrace.server.errors import anthropic_body, as_api_error, invalid, invalid_request
from headrace.server.output_parsers.deltas import (
    CallArguments,
    CallBegun,
    Content,
    Delta,
    Reasoning,
)
from headrace.server.served_model import ServedModel

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def messages(served: ServedModel, call: Call) -> None:
    """Answer a conversation, whole or as a stream of events."""
    asked = await call.read(MessagesRequest)
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(asked, name)) is not None
    }
    try:
        params = SamplingParams(
            **{
                **served.advised_sampling,
                **given,
                "max_tokens": asked.max_tokens,
                "stop": asked.stop_sequences,
            }
        )
    except RequestError as error:
        raise invalid_request(str(error).replace("stop ", "stop_sequences ")) from None
    async with answered(served, call, _asked(asked, params)) as answer:
        body = _Body(answer)
        if asked.stream:
            await call.stream(body.events(), served.settings.keepalive_seconds)
        else:
            await call.respond(await call.while_connected(body.whole()))


async def count_tokens(served: ServedModel, call: Call) -> None:
    """The tokens that a conversation makes, without an answer."""
    asked = await call.read(CountTokensRequest)
    await call.respond(
        {"input_tokens": await prompt_tokens(served, call, _asked(asked, SamplingParams()))}
    )


def _asked(asked: CountTokensRequest, params: SamplingParams) -> Asked:
    system = (
        []
        if asked.system is None
        else [{"role": "system", "content": _text(asked.system, "system")}]
    )
    converted = [
        one
        for i, message in enumerate(asked.messages)
        for one in _messages(f"messages[{i}]", message)
    ]
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in asked.tools or ()
    ]
    return Asked(
        model=asked.model,
        messages=[*system, *converted],
        params=params,
        tools=tools or None,
        tool_choice=_choice(asked.tool_choice),
        parallel_tool_calls=not (asked.tool_choice and asked.tool_choice.disable_parallel_tool_use),
        continue_final_message=asked.messages[-1].role == "assistant",
        reasoning_effort="none" if asked.thinking and asked.thinking.type == "disabled" else None,
    )


def _choice(choice: AnthropicToolChoice | None) -> str | dict[str, Any] | None:
    """The same in OpenAI's form."""
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _messages(where: str, message: AnthropicMessage) -> list[dict[str, Any]]:
    """A message as chat templates read it. What came of tools are messages of their own, before the
    rest.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, calls, texts, thoughts = [], [], [], []
    for i, block in enumerate(message.content):
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(
                    {
                        "id": block.id or "",
                        "type": "function",
                        "function": {"name": block.name or "", "arguments": block.input or {}},
                    }
                )
            case "tool_result":
                text = _text(block.content or "", f"{where}.content[{i}]")
                results.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text}
                )
            case _:
                raise invalid(
                    f"{where}.content[{i}]: this model reads text only, not {block.type!r}",
                    "messages",
                    "unsupported_parameter",
                )
    own: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return [*results, own] if texts or calls or thoughts or not results else results


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise invalid(
                f"{where}: this model reads text only, not {block.type!r}",
                where.partition("[")[0],
                "unsupported_parameter",
            )
    return "\n".join(block.text or "" for block in content)


class _Body:
    """The response to one request: a list of blocks, each of one kind."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._id = f"msg_{uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._stop: tuple[str | None, str | None] = (None, None)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Raises what it failed of."""
        async for piece in self._answer.pieces():
            for delta in piece.deltas:
                self._add(delta)
            if piece.finish_reason:
                self._end(piece.finish_reason, piece.stop_reason)
        return self._message(
            [
                _filled(block, "".join(texts))
                for block, texts in zip(self._blocks, self._texts, strict=True)
            ]
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as it comes. An error is its last event."""
        try:
            yield named_event("message_start", {"message": self._message([])})
            async for piece in self._answer.pieces():
                for delta in piece.deltas:
                    begun = len(self._blocks)
                    self._add(delta)
                    if len(self._blocks) > begun:
                        if begun:
                            yield named_event("content_block_stop", {"index": begun - 1})
                        yield named_event(
                            "content_block_start",
                            {"index": begun, "content_block": self._blocks[-1]},
                        )
                    if not isinstance(delta, CallBegun):
                        yield named_event(
                            "content_block_delta",
                            {"index": len(self._blocks) - 1, "delta": _delta(delta)},
                        )
                if piece.finish_reason:
                    self._end(piece.finish_reason, piece.stop_reason)
            if self._blocks:
                yield named_event("content_block_stop", {"index": len(self._blocks) - 1})
            reason, sequence = self._stop
            yield named_event(
                "message_delta",
                {
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": self._usage(),
                },
            )
            yield named_event("message_stop", {})
        except Exception as error:
            yield named_event("error", anthropic_body(as_api_error(error)))

    def _add(self, delta: Delta) -> None:
        """Add a delta to the last block, or to a new one."""
        last = self._blocks[-1]["type"] if self._blocks else ""
        match delta:
            case CallBegun():
                self._open({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
                return
            case Content() if last != "text":
                self._open({"type": "text", "text": ""})
            case Reasoning() if last != "thinking":
                self._open({"type": "thinking", "thinking": "", "signature": ""})
        self._texts[-1].append(delta.text)

    def _open(self, block: dict[str, Any]) -> None:
        self._blocks.append(block)
        self._texts.append([])

    def _end(self, reason: str, stop: int | str | None) -> None:
        called = any(block["type"] == "tool_use" for block in self._blocks)
        if reason == "stop" and isinstance(stop, str):
            self._stop = ("stop_sequence", stop)
        else:
            self._stop = (
                "tool_use" if called and reason == "stop" else _STOP_REASONS.get(reason),
                None,
            )

    def _usage(self) -> dict[str, int]:
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt,
            "output_tokens": usage.completion,
            "cache_read_input_tokens": usage.cached,
        }

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        reason, sequence = self._stop
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    """A block with all of its text."""
    if block["type"] != "tool_use":
        return block | {block["type"]: text}
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):  # as the model wrote it, or as far as it came
        arguments = {"": text}
    return block | {"input": arguments}


def _delta(delta: Content | Reasoning | CallArguments) -> dict[str, str]:
    match delta:
        case Content():
            return {"type": "text_delta", "text": delta.text}
        case Reasoning():
            return {"type": "thinking_delta", "thinking": delta.text}
    return {"type": "input_json_delta", "partial_json": delta.text}
