"""Conversations in the form that all chat APIs share."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import RequestError
from headrace.json_schema import enforceable, log_dropped
from headrace.outputs import Logprobs
from headrace.prompts import TokenizedPrompt
from headrace.remote import frames
from headrace.remote.stream import Stream
from headrace.request import DEFAULT_OPTIONS, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.server.errors import ApiError, invalid
from headrace.server.generation import RequestTimer, StreamInterval, Usage, finish_reason
from headrace.server.http_exchange import HttpExchange
from headrace.server.openai_records import Thinking
from headrace.server.output_parsers.deltas import Delta, Reasoning
from headrace.server.output_parsers.parser import OutputParser
from headrace.server.output_parsers.reasoning_formats import ReasoningState
from headrace.server.output_parsers.tool_grammar import answer_envelope, tool_grammar
from headrace.server.output_parsers.tools import Tool, ToolChoice, read_tool_choice, read_tools
from headrace.server.repeated_calls import RepeatedCalls
from headrace.server.response_format import errors_name
from headrace.server.state import NO_TRUNCATION, ServerState, Truncation
from headrace.structured_outputs import StructuredOutputs


@dataclass(frozen=True, kw_only=True)
class Conversation:
    model: str | None
    messages: list[dict[str, Any]]
    params: SamplingParams
    places: Sequence[str] | None = None
    """Name of each message in errors; None for `messages[0]` and so on."""
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    chat_template: str | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    include_reasoning: bool = True
    messages_field: str = "messages"
    max_tokens_field: str = "max_tokens"
    truncation: Truncation = NO_TRUNCATION
    stream_interval: int | None = None
    schema_field: str = "function.parameters"
    """Field of a tool that has its schema."""
    options: RequestOptions = DEFAULT_OPTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputChunk:
    index: int
    deltas: list[Delta]
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(kw_only=True)
class Generation:
    model: str
    n: int
    usage: Usage
    stream: Stream
    parsers: list[OutputParser]
    timer: RequestTimer
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None = None
    """Set when the generation ends."""
    repeated_calls: list[RepeatedCalls] | None = None
    """Of each output, if the request demands calls and allows several."""
    include_reasoning: bool = True
    stream_interval: int | None = None

    async def chunks(self) -> AsyncIterator[OutputChunk]:
        """Yield each step's output. Raises the error that ended the generation."""
        interval = StreamInterval(self.stream_interval)
        async for event in self._outputs():
            if isinstance(event, frames.Ended):
                self.timer.end(event)
                self.usage.cached = event.cached_tokens
                self.prompt_logprobs = event.prompt_logprobs
                continue
            self.usage.completion += len(event.token_ids)
            self.timer.add_tokens(event.index, len(event.token_ids))
            if (item := interval.push(event.index, event)) is None:
                continue
            parser, reason = self.parsers[item.index], finish_reason(item)
            deltas = parser.push(item.text)
            if item.finish_reason:
                deltas += parser.finish()
                if reason == "length" and parser.has_dropped_calls:
                    reason = "stop"  # the length cut only calls that the request forbids
            if deltas and all(isinstance(delta, Reasoning) for delta in deltas):
                self.usage.reasoning += len(item.token_ids)
            if not self.include_reasoning:
                deltas = [delta for delta in deltas if not isinstance(delta, Reasoning)]
            yield OutputChunk(
                index=item.index,
                deltas=deltas,
                token_ids=item.token_ids,
                logprobs=item.logprobs,
                finish_reason=reason,
                stop_reason=item.stop_reason,
            )

    async def _outputs(self) -> AsyncIterator[frames.StepOutput | frames.Ended]:
        """Yield the events of the stream, without those after a repeated call."""
        cutters = self.repeated_calls
        ended: set[int] = set()
        async for event in self.stream:
            if cutters is None or isinstance(event, frames.Ended):
                yield event
                continue
            if event.index in ended:
                continue
            output = cutters[event.index].cut(event)
            if output.finish_reason:
                ended.add(event.index)
            if output is not event and len(ended) == self.n:
                self.stream.finish()
            yield output


@asynccontextmanager
async def generate(
    http: HttpExchange, state: ServerState, conversation: Conversation
) -> AsyncIterator[Generation]:
    """Submit a conversation; leaving the context aborts it.

    Raises ApiError, RequestError for wrong tools, and the errors of the engine.
    """
    adapter = state.resolve_adapter(conversation.model)
    tools, choice = _read_tools(state, conversation)
    callable_tools = tools if choice.mode != "none" else ()
    output_format, params = state.output_format, conversation.params
    if output_format.needs_special_tokens(state.control_tokens, bool(callable_tools)):
        params = replace(params, skip_special_tokens=False)
    thinking = conversation.thinking
    if thinking and thinking.budget_tokens and params.thinking_budget is None:
        # A model without reasoning uses no token of the budget.
        budget = output_format.thinking_budget(thinking.budget_tokens)
        params = replace(params, thinking_budget=budget)

    with state.admit(http, params.n, conversation.options.priority):
        prompt_text, prompt = await _tokenize(state, conversation, choice, params.max_tokens)
        reasoning = _reasoning_state(state, conversation, prompt_text)
        # Tool calls that the request demands have the format of calls: no other restriction holds.
        if grammar := _tool_call_grammar(state, conversation, tools, choice, reasoning):
            params = replace(params, structured_outputs=grammar)
        elif params.structured_outputs is not None:
            restricted = _restricted_answer(
                state, conversation, callable_tools, params.structured_outputs, reasoning
            )
            params = replace(params, structured_outputs=restricted)
        if params.stop:
            markers = output_format.reasoning_markers(has_begun=reasoning == "begun")
            params = replace(params, stop_after=markers)
        options = replace(conversation.options, adapter=adapter)
        async with state.submit(http, [prompt], params, options) as (stream,):
            parsers = _Parsers(
                state=state,
                params=params,
                choice=choice,
                tools=callable_tools,
                parallel=conversation.parallel_tool_calls,
                reasoning=reasoning,
            )
            yield Generation(
                model=adapter or state.settings.model_name,
                n=params.n,
                usage=Usage(len(prompt)),
                stream=stream,
                parsers=[parsers.parser() for _ in range(params.n)],
                repeated_calls=parsers.repeated_calls(),
                timer=RequestTimer(state.metrics, http.stopwatch),
                prompt_token_ids=prompt,
                include_reasoning=conversation.include_reasoning,
                stream_interval=conversation.stream_interval,
            )


@dataclass(frozen=True, kw_only=True)
class _Parsers:
    """Makes what reads the outputs of one request."""

    state: ServerState
    params: SamplingParams
    choice: ToolChoice
    tools: Sequence[Tool]
    parallel: bool
    reasoning: ReasoningState

    def parser(self) -> OutputParser:
        skips = self.params.skip_special_tokens
        return self.state.output_format.parser(
            in_reasoning=self.reasoning == "begun",
            tools=self.tools,
            end_tokens=() if skips else self.state.end_tokens,
            parallel=self.parallel,
            demanded=self.choice.demanded(self.tools),
        )

    def repeated_calls(self) -> list[RepeatedCalls] | None:
        if not self.parallel or not self.choice.demanded(self.tools):
            return None
        skips, tokenizer = self.params.skip_special_tokens, self.state.tokenizer
        return [
            RepeatedCalls(self.parser(), tokenizer.decoder(skips, continues=True))
            for _ in range(self.params.n)
        ]


async def count_prompt_tokens(
    http: HttpExchange, state: ServerState, conversation: Conversation
) -> int:
    state.resolve_adapter(conversation.model)
    _, choice = _read_tools(state, conversation)
    with state.admit(http, 1):
        _, prompt = await _tokenize(state, conversation, choice, max_tokens=0)
        return len(prompt)


def _read_tools(
    state: ServerState, conversation: Conversation
) -> tuple[Sequence[Tool], ToolChoice]:
    tools = read_tools(conversation.tools)
    choice = read_tool_choice(conversation.tool_choice, tools)
    if tools and choice.mode != "none" and state.output_format.tool_call_format is None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "tools are turned off on this server (--tool-call-parser none); leave them out",
            param="tools",
        )
    if choice.allowed is not None:
        tools = tuple(tool for tool in tools if tool.name in choice.allowed)
    return tools, choice


async def _tokenize(
    state: ServerState, conversation: Conversation, choice: ToolChoice, max_tokens: int | None
) -> tuple[str, list[int]]:
    texts: list[str] = []

    def read() -> TokenizedPrompt:
        prompt = _render(state, conversation, choice)
        texts.append(prompt.text or "")
        return prompt

    ids = await state.tokenize(
        read,
        conversation.messages_field,
        max_tokens,
        max_tokens_field=conversation.max_tokens_field,
        truncation=conversation.truncation,
    )
    return texts[0], ids


def _render(state: ServerState, conversation: Conversation, choice: ToolChoice) -> TokenizedPrompt:
    return state.prompt_reader.read_chat(
        conversation.messages,
        tools=_offered(conversation, choice),
        documents=conversation.documents,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        chat_template_kwargs=_template_kwargs(conversation) or None,
        chat_template=conversation.chat_template,
        sanitize_control_tokens=state.settings.sanitize_control_tokens,
        places=conversation.places,
    )


def _offered(conversation: Conversation, choice: ToolChoice) -> Sequence[Mapping[str, Any]] | None:
    """The tools that the prompt describes; None if there are none."""
    if choice.mode == "none" or not conversation.tools:
        return None
    allowed = choice.allowed
    return [
        tool
        for tool in conversation.tools
        if allowed is None or tool["function"]["name"] in allowed
    ]


def _template_kwargs(conversation: Conversation) -> dict[str, Any]:
    kwargs = dict(conversation.chat_template_kwargs or {})
    effort = conversation.reasoning_effort
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        kwargs.setdefault("enable_thinking", effort != "none")
    elif conversation.thinking and conversation.thinking.is_on is not None:
        kwargs.setdefault("enable_thinking", conversation.thinking.is_on)
    return kwargs


def _reasoning_state(
    state: ServerState, conversation: Conversation, prompt_text: str
) -> ReasoningState:
    kwargs = _template_kwargs(conversation)
    wanted = kwargs.get("enable_thinking", kwargs.get("thinking"))
    continued = ""
    if conversation.continue_final_message and conversation.messages:
        content = conversation.messages[-1].get("content")
        continued = content if isinstance(content, str) else ""
    return state.output_format.reasoning_state(
        prompt_text, may_reason=wanted is not False, continued=continued
    )


def _tool_call_grammar(
    state: ServerState,
    conversation: Conversation,
    tools: Sequence[Tool],
    choice: ToolChoice,
    reasoning: ReasoningState,
) -> StructuredOutputs | None:
    enforced, dropped = _enforceable_tools(state, conversation, tools, choice)
    grammar = tool_grammar(
        state.output_format,
        enforced,
        choice,
        parallel=conversation.parallel_tool_calls,
        reasoning=reasoning,
        control_tokens=state.control_tokens,
    )
    if grammar is None:
        return None
    with errors_name("tools"):
        return StructuredOutputs(
            grammar=grammar,
            dropped=dropped,
            field="tools",
            tool_schemas=[(tool.field, json.dumps(tool.parameters)) for tool in enforced],
        )


def _restricted_answer(
    state: ServerState,
    conversation: Conversation,
    tools: Sequence[Tool],
    answer: StructuredOutputs,
    reasoning: ReasoningState,
) -> StructuredOutputs:
    """Let reasoning precede the answer, and calls of tools that it need not make replace it."""
    lenient = [replace(tool, parameters=_lenient_parameters(tool)) for tool in tools]
    envelope = answer_envelope(
        state.output_format,
        reasoning,
        state.control_tokens,
        lenient,
        parallel=conversation.parallel_tool_calls,
    )
    return replace(answer, envelope=envelope)


def _lenient_parameters(tool: Tool) -> Mapping[str, Any]:
    """What a grammar enforces of a schema; the model may call the tool, but need not."""
    try:
        return enforceable(tool.parameters, tool.field, strict=False).schema
    except RequestError:
        return {"type": "object"}


def _enforceable_tools(
    state: ServerState, conversation: Conversation, tools: Sequence[Tool], choice: ToolChoice
) -> tuple[list[Tool], list[str]]:
    """The tools with what a grammar enforces of their schemas, and the paths of the rest."""
    if choice.mode not in ("required", "named"):
        return list(tools), []
    result: list[Tool] = []
    dropped: list[str] = []
    for tool in tools:
        if choice.mode == "named" and tool.name != choice.name:
            continue
        strict = state.settings.strict_schemas if tool.strict is None else tool.strict
        try:
            field = f"{tool.field}.{conversation.schema_field}"
            found = enforceable(tool.parameters, field, strict=strict)
        except RequestError as error:
            raise invalid(f"{error} (tool {tool.name})", "tools") from None
        result.append(replace(tool, parameters=found.schema, field=field))
        dropped += found.dropped
    if dropped:
        log_dropped(dropped)
    return result, dropped
