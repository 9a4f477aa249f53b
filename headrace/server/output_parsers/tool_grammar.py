"""Grammars that make a model call tools: what `tool_choice` promises."""

from collections.abc import Mapping, Sequence

from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.parser import OutputFormat
from headrace.server.output_parsers.reasoning_formats import ReasoningFormat
from headrace.server.output_parsers.tools import Tool, ToolChoice


def tool_grammar(
    style: OutputFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    in_reasoning: bool = False,
    control_tokens: Mapping[str, int] | None = None,
) -> str | None:
    """A grammar in llguidance's Lark dialect by which an answer is nothing but calls, after its
    reasoning; None where it is free.

    `parallel`: several calls may come, though not of a named tool. `inside`: the prompt ended
    within reasoning, which must end first.
    `control_tokens`: ids of the tokenizer's control tokens by their texts, since a grammar writes
    these as tokens.
    """
    if choice.mode not in ("required", "named") or style.tool_call_format is None:
        return None
    named = choice.mode == "named"
    lark = LarkGrammar(control_tokens or {})
    calls = style.tool_call_format.grammar(
        lark,
        [tool for tool in tools if not named or tool.name == choice.name],
        parallel and not named,
    )
    return lark.render(f"{_reasoning(lark, style.reasoning_format, in_reasoning)} {calls}")


def _reasoning(
    lark: LarkGrammar, reasoning_format: ReasoningFormat | None, in_reasoning: bool
) -> str:
    """Reasoning, which may be left out unless the prompt has begun it."""
    if reasoning_format is None:
        return ""
    space = lark.rule(r"/[ \t\r\n]{0,4}/")
    rest = f"{lark.up_to(reasoning_format.end)} {space}"
    return rest if in_reasoning else f"({lark.text(reasoning_format.begin)} {rest})?"
