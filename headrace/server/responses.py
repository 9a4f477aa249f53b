"""`POST /v1/responses`: OpenAI's Responses API, without storage."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import msgspec

from headrace.messages import text_of_part
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.server.conversation import Conversation, generate
from headrace.server.errors import ApiError, as_api_error, invalid
from headrace.server.generation import sampling_params
from headrace.server.http_exchange import HttpExchange, named_sse_event
from headrace.server.openai_records import ContentPart
from headrace.server.response_format import response_format
from headrace.server.response_items import ResponseItems
from headrace.server.responses_records import InputItem, ResponsesRequest
from headrace.server.state import ServerState
from headrace.structured_outputs import StructuredOutputs

_TOOL_FIELDS = ("name", "description", "parameters", "strict")


async def responses(http: HttpExchange, state: ServerState) -> None:
    """Generate the next message of a conversation, with one response or a stream of events."""
    request = await http.read(ResponsesRequest)
    params = _sampling_params(state, request)
    async with generate(http, state, _conversation(request, params)) as generation:
        items = ResponseItems(request, generation, params, state.tokenizer)
        if request.stream:
            await http.stream_events(_events(items), state.settings.keepalive_seconds)
        else:
            await http.respond(await http.while_connected(_body(items)))


def _sampling_params(state: ServerState, request: ResponsesRequest) -> SamplingParams:
    strict = state.settings.strict_schemas
    params = sampling_params(
        request,
        state.advised_sampling,
        strict_schemas=strict,
        max_tokens=request.max_output_tokens,
        logprobs=request.num_logprobs,
    )
    text_format = _text_format(request, strict)
    if text_format is None:
        return params
    if params.structured_outputs is not None:
        raise invalid("structured_outputs and text.format both restrict the text", "text")
    return replace(params, structured_outputs=text_format)


def _text_format(request: ResponsesRequest, strict: bool) -> StructuredOutputs | None:
    text_format = (request.text or {}).get("format")
    if text_format is not None and not isinstance(text_format, dict):
        raise invalid("text.format must be an object", "text")
    return response_format(text_format, "text", "text.format.schema", strict)


async def _body(items: ResponseItems) -> dict[str, Any]:
    async for _ in items.events():
        pass
    return items.response()


async def _events(items: ResponseItems) -> AsyncGenerator[bytes]:
    number = 0
    try:
        async for name, fields in items.events():
            yield named_sse_event(name, {"sequence_number": number, **fields})
            number += 1
    except Exception as error:
        api_error = as_api_error(error)
        yield named_sse_event(
            "error",
            {
                "sequence_number": number,
                "code": api_error.code,
                "message": api_error.message,
                "param": api_error.param,
            },
        )


def _conversation(request: ResponsesRequest, params: SamplingParams) -> Conversation:
    if isinstance(request.input, str):
        messages, places = [{"role": "user", "content": request.input}], ["input"]
    else:
        messages, places = _chat_messages(request.input)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
        places.insert(0, "instructions")

    template_kwargs: dict[str, Any] = {}
    if (verbosity := (request.text or {}).get("verbosity")) is not None:
        template_kwargs["verbosity"] = verbosity
    choice = request.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return Conversation(
        model=request.model,
        messages=messages,
        places=places,
        params=params,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        tool_choice=choice,
        schema_field="parameters",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        include_reasoning=request.include_reasoning is not False,
        chat_template_kwargs=template_kwargs | (request.chat_template_kwargs or {}),
        max_tokens_field="max_output_tokens",
        options=RequestOptions(priority=request.priority or 0, cache_salt=request.cache_salt),
    )


def _tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(
            400, "unsupported_parameter", f"{field}.type must be function", param="tools"
        )
    function = {name: tool[name] for name in _TOOL_FIELDS if name in tool}
    return {"type": "function", "function": function}


def _chat_messages(items: list[InputItem]) -> tuple[list[dict[str, Any]], list[str]]:
    """Convert items to chat messages, and name each message in errors."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    assistant: dict[str, Any] | None = None  # the message to which further items are added
    for i, item in enumerate(items):
        field = f"input[{i}]"
        message: dict[str, Any] | None = None
        match item.type or "message":
            case "message":
                if not item.role:
                    raise invalid(f"{field} is a message and must have a role", "input")
                message = {"role": item.role, "content": _content(item.content)}
                if item.role == "assistant" and assistant and not assistant["content"]:
                    assistant["content"] = message["content"]
                    continue
                assistant = message if item.role == "assistant" else None
            case "function_call" | "reasoning" as kind:
                if assistant is None:
                    message = assistant = {"role": "assistant", "content": ""}
                if kind == "reasoning":
                    assistant["reasoning_content"] = _joined(item.content, f"{field}.content")
                else:
                    function = {"name": item.name, "arguments": item.arguments}
                    tool_call = {"id": item.call_id or "", "function": function}
                    assistant.setdefault("tool_calls", []).append(tool_call)
            case "function_call_output":
                message = {
                    "role": "tool",
                    "tool_call_id": item.call_id or "",
                    "content": _content(item.output),
                }
                assistant = None
            case kind:
                raise invalid(
                    f"{field}.type {kind!r} is unknown; use message, function_call, "
                    "function_call_output or reasoning",
                    "input",
                )
        if message is not None:
            messages.append(message)
            places.append(field)
    return messages, places


def _content(content: str | list[ContentPart] | None) -> str | list[dict[str, Any]]:
    if isinstance(content, list):
        return [msgspec.to_builtins(part) for part in content]
    return content or ""


def _joined(content: str | list[ContentPart] | None, field: str) -> str:
    parts = _content(content)
    if isinstance(parts, str):
        return parts
    return "\n".join(text_of_part(part, f"{field}[{i}]") for i, part in enumerate(parts))
