"""The formats of tool calls, and which of them a chat template uses."""

from headrace.errors import RequestError
from headrace.server.output_parsers.formats import (
    deepseek,
    glm,
    harmony,
    hermes,
    json_lists,
    llama3,
    mistral,
    pythonic,
    xml,
)
from headrace.server.output_parsers.tool_call_format import ToolCallFormat

# In the order in which a template is asked: what is more particular comes first. All of its texts
# must be in the template.
_DETECTED: tuple[tuple[ToolCallFormat, tuple[str, ...]], ...] = (
    (harmony.FORMAT, ("<|channel|>", "<|message|>")),
    (deepseek.V3, ("<｜tool▁calls▁begin｜>", "```json")),
    (deepseek.V31, ("<｜tool▁calls▁begin｜>",)),
    (deepseek.KIMI, ("<|tool_call_argument_begin|>",)),
    (mistral.WITH_ID, ("[TOOL_CALLS]", "[CALL_ID]")),
    (mistral.WITHOUT_ID, ("[TOOL_CALLS]", "[ARGS]")),
    (mistral.LIST, ("[TOOL_CALLS]",)),
    (json_lists.COMMAND, ("<|START_ACTION|>",)),
    (json_lists.PHI4_MINI, ("<|tool_call|>", "<|/tool_call|>")),
    (json_lists.GRANITE, ("<|tool_call|>",)),
    (glm.FORMAT, ("<tool_call>", "<arg_key>")),
    (xml.FORMAT, ("<function=", "<parameter=")),
    (pythonic.LLAMA4, ("<|python_start|>",)),
    (pythonic.LFM2, ("<|tool_call_start|>",)),
    (pythonic.OLMO3, ("<function_calls>",)),
    (pythonic.PYTHONIC, ("[func_name1(",)),
    (hermes.FORMAT, ("<tool_call>",)),
    (llama3.FORMAT, ("<|start_header_id|>", '"parameters": ')),
)

TOOL_CALL_FORMATS = {tool_call_format.name: tool_call_format for tool_call_format, _ in _DETECTED}
"""All formats by their names, which `--tool-call-parser` takes."""


def detect_tool_call_format(template: str) -> ToolCallFormat | None:
    """The format of calls that a chat template writes or asks for; None where it knows no tools."""
    return next(
        (
            tool_call_format
            for tool_call_format, texts in _DETECTED
            if all(text in template for text in texts)
        ),
        None,
    )


def tool_call_format_by_name(name: str) -> ToolCallFormat:
    """A format by its name. Raises RequestError for an unknown one."""
    if name not in TOOL_CALL_FORMATS:
        raise RequestError(
            f"there is no format of tool calls named {name!r}: use one of "
            f"{', '.join(sorted(TOOL_CALL_FORMATS))}"
        )
    return TOOL_CALL_FORMATS[name]
