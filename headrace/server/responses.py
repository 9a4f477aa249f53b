"""`POST /v1/responses`: OpenAI's Responses API, without storage."""

from collections.abc import AsyncGenerator
from typing import Any

from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.server.conversation import Conversation, generate
from headrace.server.errors import ApiError, as_api_error, invalid, request_error
from headrace.server.generation import given_fields
from headrace.server.http_exchange import HttpExchange, named_sse_event
from headrace.server.response_format import response_format
from headrace.server.response_items import ResponseItems
from headrace.server.responses_records import InputItem, ResponsesRequest
from headrace.server.state import ServerState
from headrace.server.template_messages import content_text, template_tool_call
from headrace.structured_outputs import StructuredOutputs

_TOOL_FIELDS = ("name", "description", "parameters", "strict")


async def responses(http: HttpExchange, state: ServerState) -> None:
    """Generate the next message of a conversation, with one response or a stream of events."""
    request = await http.read(ResponsesRequest)
    _check(request)
    params = _sampling_params(state, request)
    async with generate(http, state, _conversation(request, params)) as generation:
        items = ResponseItems(request, generation, params)
        if request.stream:
            await http.stream_events(_events(items), state.settings.keepalive_seconds)
        else:
            await http.respond(await http.while_connected(_body(items)))


def _check(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "background"):
        if getattr(request, name):
            raise ApiError(
                400,
                "unsupported_parameter",
                f"{name} is not supported, because responses are not stored; "
                "send the whole conversation",
                param=name,
            )


def _sampling_params(state: ServerState, request: ResponsesRequest) -> SamplingParams:
    options = {
        **state.advised_sampling,
        **given_fields(request, ("temperature", "top_p")),
        "max_tokens": request.max_output_tokens,
        "structured_outputs": _text_format(request),
    }
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise request_error(str(error)) from None


def _text_format(request: ResponsesRequest) -> StructuredOutputs | None:
    text_format = (request.text or {}).get("format")
    if text_format is not None and not isinstance(text_format, dict):
        raise invalid("text.format must be an object", "text")
    return response_format(text_format, "text")


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
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += _template_messages(request.input)

    choice = request.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return Conversation(
        model=request.model,
        messages=messages,
        params=params,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
    )


def _tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(
            400, "unsupported_parameter", f"{field}.type must be function", param="tools"
        )
    function = {name: tool[name] for name in _TOOL_FIELDS if name in tool}
    return {"type": "function", "function": function}


def _template_messages(items: list[InputItem]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    assistant: dict[str, Any] | None = None  # the message to which further items are added
    for i, item in enumerate(items):
        field = f"input[{i}]"
        match item.type or "message":
            case "message":
                if not item.role:
                    raise invalid(f"{field} is a message and must have a role", "input")
                text = content_text(item.content, field, "input") or ""
                if item.role == "assistant" and assistant and not assistant["content"]:
                    assistant["content"] = text
                    continue
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": text})
                assistant = messages[-1] if role == "assistant" else None
            case "function_call" | "reasoning" as kind:
                if assistant is None:
                    assistant = {"role": "assistant", "content": ""}
                    messages.append(assistant)
                if kind == "reasoning":
                    thoughts = content_text(item.content, field, "input") or ""
                    assistant["reasoning_content"] = thoughts
                else:
                    tool_calls = assistant.setdefault("tool_calls", [])
                    tool_calls.append(_tool_call(item, field))
            case "function_call_output":
                text = content_text(item.output, field, "input") or ""
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id or "", "content": text}
                )
                assistant = None
            case kind:
                raise invalid(
                    f"{field}.type {kind!r} is unknown; use message, function_call, "
                    "function_call_output or reasoning",
                    "input",
                )
    return messages


def _tool_call(item: InputItem, field: str) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    tool_call = {"id": item.call_id or "", "type": "function", "function": function}
    return template_tool_call(tool_call, field, "input")
