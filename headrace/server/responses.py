"""`POST /v1/responses`: OpenAI's Responses API, without storage."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.server.conversation import Conversation, generate
from headrace.server.errors import as_api_error, invalid
from headrace.server.generation import sampling_params
from headrace.server.http_exchange import HttpExchange, named_sse_event
from headrace.server.response_format import response_format
from headrace.server.response_items import ResponseItems
from headrace.server.responses_input import (
    chat_messages,
    check_demanded,
    read_response_choice,
    read_response_tools,
)
from headrace.server.responses_records import ResponsesRequest
from headrace.server.state import ServerState
from headrace.structured_outputs import StructuredOutputs


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
        messages, places = chat_messages(request.input)
    if not messages:
        # Some clients send no input to see whether the server answers.
        messages, places = [{"role": "user", "content": ""}], ["input"]
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
        places.insert(0, "instructions")

    template_kwargs: dict[str, Any] = {}
    if (verbosity := (request.text or {}).get("verbosity")) is not None:
        template_kwargs["verbosity"] = verbosity
    tools = read_response_tools(request.tools)
    choice = read_response_choice(request.tool_choice)
    check_demanded(tools, choice)
    return Conversation(
        model=request.model,
        messages=messages,
        places=places,
        params=params,
        tools=[tool.chat_tool for tool in tools.values()] or None,
        tool_choice=choice,
        schema_field="parameters",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        include_reasoning=request.include_reasoning is not False,
        chat_template_kwargs=template_kwargs | (request.chat_template_kwargs or {}),
        messages_field="input",
        max_tokens_field="max_output_tokens",
        options=RequestOptions(priority=request.priority or 0, cache_salt=request.cache_salt),
    )
