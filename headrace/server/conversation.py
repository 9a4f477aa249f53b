"""A conversation and its answer, as all APIs that answer conversations have need of them: read,
submitted, parsed as it comes.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headrace.prompts import TokenizedPrompt
from headrace.remote import frames
from headrace.remote.stream import Stream
from headrace.request import DEFAULT_OPTIONS, Logprobs, RequestOptions, SamplingParams
from headrace.server.asgi import Call
from headrace.server.errors import ApiError, invalid
from headrace.server.generation import Clock, Usage, finish_reason
from headrace.server.output_parsers.deltas import Delta, Reasoning
from headrace.server.output_parsers.parser import AnswerParser
from headrace.server.output_parsers.tool_grammar import tool_grammar
from headrace.server.output_parsers.tools import Tool, ToolChoice, read_tool_choice, read_tools
from headrace.server.served_model import ServedModel
from headrace.server.structured import checked
from headrace.structured_outputs import StructuredOutputs


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked for, whichever API it was asked by."""

    model: str | None
    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] | None = None
    """In OpenAI's form."""
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    options: RequestOptions = DEFAULT_OPTIONS


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step brought to one continuation."""

    index: int
    deltas: list[Delta]
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class Answer:
    """The answer to one conversation: `n` continuations."""

    model: str
    n: int
    usage: Usage
    _stream: Stream
    _parsers: list[AnswerParser]
    _clock: Clock
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds of queue, prefill and decode, once it has ended."""

    async def pieces(self) -> AsyncIterator[Piece]:
        """What comes of it, as it comes. Raises what it failed of."""
        async for item in self._stream:
            if isinstance(item, frames.Ended):
                self._clock.ended(item)
                self.usage.cached, self.timing = item.cached_tokens, self._clock.timing
                continue
            self.usage.completion += len(item.token_ids)
            self._clock.tokens(len(item.token_ids))
            parser, reason = self._parsers[item.index], finish_reason(item)
            deltas = parser.push(item.text)
            if item.finish_reason:
                deltas += parser.finish()
            if deltas and all(isinstance(delta, Reasoning) for delta in deltas):
                self.usage.reasoning += len(item.token_ids)
            yield Piece(item.index, deltas, item.token_ids, item.logprobs, reason, item.stop_reason)


@asynccontextmanager
async def answered(served: ServedModel, call: Call, asked: Asked) -> AsyncIterator[Answer]:
    """The answer to a conversation; it ends with the context. Raises ApiError, and what
    `ServedModel` raises.
    """
    adapter, (tools, choice) = served.adapter_of(asked.model), _tools(served, asked)
    style, wanted, params = (
        served.answer_style,
        tools if choice.mode != "none" else (),
        asked.params,
    )
    if style.needs_special_tokens(served.control_tokens, bool(wanted)):
        params = replace(params, skip_special_tokens=False)
    with served.admitted(call, params.n):
        texts: list[str] = []
        prompt = await served.tokens_of(
            partial(_read, served, asked, choice, texts), "messages", params.max_tokens
        )
        if grammar := _call_grammar(served, asked, tools, choice, texts[0]):
            params = replace(params, structured_outputs=grammar)
        options = replace(asked.options, adapter=adapter)
        async with served.submitted(call, [prompt], params, options) as (stream,):
            parsers = [_parser(served, texts[0], wanted, params) for _ in range(params.n)]
            model = adapter or served.settings.model_name
            yield Answer(
                model, params.n, Usage(len(prompt)), stream, parsers, Clock(served.metrics)
            )


async def prompt_tokens(served: ServedModel, call: Call, asked: Asked) -> int:
    """The tokens of a conversation. Raises as `answered` does."""
    served.adapter_of(asked.model)
    _, choice = _tools(served, asked)
    with served.admitted(call, 1):
        return len(await served.tokens_of(partial(_read, served, asked, choice, []), "messages", 0))


def _call_grammar(
    served: ServedModel, asked: Asked, tools: Sequence[Tool], choice: ToolChoice, prompt: str
) -> StructuredOutputs | None:
    """What makes the answer nothing but calls, where `tool_choice` asks for that. Raises
    ApiError.
    """
    style = served.answer_style
    inside, tokens = style.begins_inside(prompt), served.control_tokens
    grammar = tool_grammar(
        style,
        tools,
        choice,
        parallel=asked.parallel_tool_calls,
        inside=inside,
        control_tokens=tokens,
    )
    if grammar is None:
        return None
    if asked.params.structured_outputs:
        raise invalid(
            "tool_choice asks for calls alone, and the text must be something else as "
            "well: give one of the two",
            "tool_choice",
        )
    return checked("tools", grammar=grammar)


def _tools(served: ServedModel, asked: Asked) -> tuple[Sequence[Tool], ToolChoice]:
    """The tools of the request and how they are chosen. Raises RequestError or ApiError."""
    tools = read_tools(asked.tools)
    choice = read_tool_choice(asked.tool_choice, tools)
    if tools and choice.mode != "none" and served.answer_style.tool_format is None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "the chat template of this model takes no tools",
            param="tools",
        )
    return tools, choice


def _read(
    served: ServedModel, asked: Asked, choice: ToolChoice, texts: list[str]
) -> TokenizedPrompt:
    """The prompt, whose text is added to `texts`."""
    names = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        names = {
            "reasoning_effort": asked.reasoning_effort,
            "enable_thinking": asked.reasoning_effort != "none",
        } | names
    prompt = served.prompts.read_chat(
        asked.messages,
        tools=asked.tools if asked.tools and choice.mode != "none" else None,
        documents=asked.documents,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=names or None,
    )
    texts.append(prompt.text or "")
    return prompt


def _parser(
    served: ServedModel, prompt: str, tools: Sequence[Tool], params: SamplingParams
) -> AnswerParser:
    style = served.answer_style
    ends = () if params.skip_special_tokens else served.end_tokens
    return style.parser(inside=style.begins_inside(prompt), tools=tools, end_tokens=ends)
