"""Tools in plain text, for chat templates that know nothing of them.

The format is Hermes', which most open models have seen in training.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe tools, and how to call them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\n"
        "You may call functions. These are their JSON descriptions:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call a function, write its name and its arguments as a JSON object between tags:\n"
        '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    )


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Write normalised tool calls as the model would."""
    return "\n".join(f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls)


def result_text(text: str) -> str:
    """Write the result of a call as a user's message."""
    return f"<tool_response>\n{text}\n</tool_response>"


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
