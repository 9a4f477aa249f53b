"""`POST /v1/responses`: OpenAI's Responses API without a memory. Nothing is stored, so each request
brings its whole conversation.
"""

from collections.abc import AsyncGenerator
from typing import Any

from headrace.errors import RequestError
from headrace.request import SamplingParams
from headrace.server.asgi import Call, named_event
from headrace.server.conversation import Asked, answered
from headrace.server.errors import ApiError, as_api_error, invalid, invalid_request
from headrace.server.openai_messages import call_of, text_of
from headrace.server.response_items import ResponseItems
from headrace.server.responses_records import InputItem, ResponsesRequest
from headrace.server.served_model import ServedModel
from headrace.server.structured import response_format
from headrace.structured_outputs import StructuredOutputs


async def responses(served: ServedModel, call: Call) -> None:
    """Answer a conversation, whole or as a stream of events."""
    asked = await call.read(ResponsesRequest)
    for name in ("previous_response_id", "background"):
        if getattr(asked, name):
            raise ApiError(
                400,
                "unsupported_parameter",
                f"{name}: nothing is stored here; send the whole conversation",
                param=name,
            )
    given = {
        name: value
        for name in ("temperature", "top_p")
        if (value := getattr(asked, name)) is not None
    }
    try:
        params = SamplingParams(
            **{
                **served.advised_sampling,
                **given,
                "max_tokens": asked.max_output_tokens,
                "structured_outputs": _format(asked),
            }
        )
    except RequestError as error:
        raise invalid_request(str(error)) from None
    async with answered(served, call, _asked(asked, params)) as answer:
        items = ResponseItems(asked, answer, params)
        if asked.stream:
            await call.stream(_events(items), served.settings.keepalive_seconds)
        else:
            await call.respond(await call.while_connected(_whole(items)))


def _format(asked: ResponsesRequest) -> StructuredOutputs | None:
    """What the text must be."""
    given = (asked.text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise invalid("text.format must be an object", "text")
    return response_format(given, "text")


async def _whole(items: ResponseItems) -> dict[str, Any]:
    async for _ in items.events():
        pass
    return items.response()


async def _events(items: ResponseItems) -> AsyncGenerator[bytes]:
    """Each event with its number. An error is the last one."""
    number = 0
    try:
        async for name, fields in items.events():
            yield named_event(name, {"sequence_number": number, **fields})
            number += 1
    except Exception as error:
        told = as_api_error(error)
        yield named_event(
            "error",
            {
                "sequence_number": number,
                "code": told.code,
                "message": told.message,
                "param": told.param,
            },
        )


def _asked(asked: ResponsesRequest, params: SamplingParams) -> Asked:
    own = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    messages = (
        [{"role": "user", "content": asked.input}]
        if isinstance(asked.input, str)
        else _messages(asked.input)
    )
    choice = asked.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    tools = [_tool(i, tool) for i, tool in enumerate(asked.tools or ())]
    return Asked(
        model=asked.model,
        messages=[*own, *messages],
        params=params,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
    )


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat completions."""
    if tool.get("type") != "function":
        raise ApiError(
            400, "unsupported_parameter", f"tools[{number}].type must be function", param="tools"
        )
    return {
        "type": "function",
        "function": {
            name: tool[name]
            for name in ("name", "description", "parameters", "strict")
            if name in tool
        },
    }


def _messages(items: list[InputItem]) -> list[dict[str, Any]]:
    """Items as messages: calls and reasoning belong to one message of the assistant's, up to the
    next message.
    """
    messages: list[dict[str, Any]] = []
    open_turn: dict[str, Any] | None = None
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.type or "message":
            case "message":
                if not item.role:
                    raise invalid(f"{where}: a message must have a role", "input")
                text = text_of(item.content, where, "input") or ""
                if item.role == "assistant" and open_turn and not open_turn["content"]:
                    open_turn["content"] = text
                    continue
                messages.append(
                    {"role": "system" if item.role == "developer" else item.role, "content": text}
                )
                open_turn = messages[-1] if item.role == "assistant" else None
            case "function_call" | "reasoning" as kind:
                if open_turn is None:
                    open_turn = {"role": "assistant", "content": ""}
                    messages.append(open_turn)
                if kind == "reasoning":
                    open_turn["reasoning_content"] = text_of(item.content, where, "input") or ""
                else:
                    call = {
                        "id": item.call_id or "",
                        "type": "function",
                        "function": {"name": item.name, "arguments": item.arguments},
                    }
                    open_turn.setdefault("tool_calls", []).append(call_of(where, call, "input"))
            case "function_call_output":
                content = text_of(item.output, where, "input") or ""
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id or "", "content": content}
                )
                open_turn = None
            case kind:
                raise invalid(
                    f"{where}: an item is a message, function_call, function_call_output "
                    f"or reasoning, not {kind!r}",
                    "input",
                )
    return messages
