from collections.abc import Mapping, Sequence

from headrace.server.output_parsers.lark import LarkGrammar
from headrace.server.output_parsers.parser import OutputFormat
from headrace.server.output_parsers.reasoning_formats import ReasoningFormat
from headrace.server.output_parsers.tools import Tool, ToolChoice


def tool_grammar(
    output_format: OutputFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    in_reasoning: bool = False,
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
    return lark.render(f"{_reasoning(lark, output_format.reasoning_format, in_reasoning)} {calls}")


def _reasoning(
    lark: LarkGrammar, reasoning_format: ReasoningFormat | None, in_reasoning: bool
) -> str:
    """Match reasoning, which is optional unless the prompt has started it."""
    if reasoning_format is None:
        return ""
    space = lark.rule(r"/[ \t\r\n]{0,4}/")
    rest = f"{lark.up_to(reasoning_format.end)} {space}"
    return rest if in_reasoning else f"({lark.text(reasoning_format.begin)} {rest})?"
