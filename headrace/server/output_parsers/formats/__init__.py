"""Tool-call formats and their detection. A new format is a file here and a row in `_DETECTED`."""

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

# Formats with the texts of a chat template by which they are detected; all must be in the template.
# The first match counts, so a format whose texts include another format's texts comes before it.
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

TOOL_CALL_FORMATS = {item.name: item for item, _ in _DETECTED}


def detect_tool_call_format(template: str) -> ToolCallFormat | None:
    for tool_call_format, texts in _DETECTED:
        if all(text in template for text in texts):
            return tool_call_format
    return None


def tool_call_format_by_name(name: str) -> ToolCallFormat:
    if name not in TOOL_CALL_FORMATS:
        known = ", ".join(sorted(TOOL_CALL_FORMATS))
        raise RequestError(f"tool_call_parser {name!r} is unknown; use {known}")
    return TOOL_CALL_FORMATS[name]
