"""Grammars of whole outputs: reasoning, then tool calls or a restricted answer."""

from collections.abc import Mapping, Sequence

from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.parser import OutputFormat
from headrace.server.output_parsers.reasoning_formats import ReasoningFormat, ReasoningState
from headrace.server.output_parsers.tools import Tool, ToolChoice

_SPACE = r"/[ \t\r\n]{0,4}/"


def tool_grammar(
    output_format: OutputFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    reasoning: ReasoningState = "possible",
    control_tokens: Mapping[str, int] | None = None,
) -> str | None:
    """Return a Lark grammar of reasoning and tool calls, or None if `choice` demands no calls."""
    if choice.mode not in ("required", "named") or output_format.tool_call_format is None:
        return None
    if choice.mode == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
        parallel = False
    lark = LarkGrammar(control_tokens or {})
    calls = output_format.tool_call_format.grammar(lark, tools, parallel)
    return lark.render(f"{_reasoning(lark, output_format.reasoning_format, reasoning)} {calls}")


def answer_envelope(
    output_format: OutputFormat,
    reasoning: ReasoningState,
    control_tokens: Mapping[str, int],
    tools: Sequence[Tool] = (),
    *,
    parallel: bool = True,
) -> str:
    """Return a Lark grammar of reasoning and the restricted text, which is `@answer` in it.

    Calls of `tools` may take the place of the text. Empty if the output is the restricted text
    alone.
    """
    lark = LarkGrammar(control_tokens)
    tool_call_format, reasoning_format = (
        output_format.tool_call_format,
        output_format.reasoning_format,
    )
    lark.has_answer = True
    calls = tool_call_format.grammar(lark, tools, parallel) if tool_call_format and tools else ""
    if tool_call_format and tool_call_format.envelope:
        answer = tool_call_format.envelope(lark, "@answer", reasoning)
        return lark.render(lark.either(filter(None, (answer, calls))))
    thought = _reasoning(lark, reasoning_format, reasoning)
    answers = ["@answer"]
    if reasoning_format and reasoning_format.rest_begin:
        begin, end = lark.text(reasoning_format.rest_begin), lark.text(reasoning_format.rest_end)
        space = lark.rule(_SPACE)
        answers.append(f"{begin} {space} @answer {space} {end}")
    if calls:
        answers.append(calls)
    if not thought and len(answers) == 1:
        return ""
    return lark.render(f"{thought} ({' | '.join(answers)})")


def _reasoning(
    lark: LarkGrammar, reasoning_format: ReasoningFormat | None, state: ReasoningState
) -> str:
    """Match reasoning, which is optional if the prompt has neither started nor ended it."""
    if reasoning_format is None or state == "closed":
        return ""
    rest = f"{lark.up_to(reasoning_format.end)} {lark.rule(_SPACE)}"
    return rest if state == "begun" else f"({lark.text(reasoning_format.begin)} {rest})?"
