"""Markers around the reasoning of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.errors import RequestError
from headrace.server.output_parsers.delta_writer import DeltaWriter
from headrace.server.output_parsers.text_reader import Steps, TextReader

ReasoningState = Literal["begun", "possible", "closed"]
"""Whether the output begins inside of reasoning, may begin reasoning, or has none."""


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    begin: str
    end: str
    rest_begin: str = ""
    rest_end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        markers = (self.begin, self.end, self.rest_begin, self.rest_end)
        return tuple(filter(None, markers))

    def state(self, prompt: str, *, may_reason: bool = True, continued: str = "") -> ReasoningState:
        """The state at the end of a prompt.

        `continued` is the beginning of the response, if the prompt ends with one. Without
        `may_reason` the request has turned reasoning off.
        """
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin) or continued.rfind(self.begin) > continued.rfind(self.end):
            return "begun"
        return "closed" if prompt.endswith(self.end) or not may_reason else "possible"


# Detected in this order. A template must contain all markers of a format.
_DETECTED = (
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
    ReasoningFormat(
        name="command",
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        rest_begin="<|START_RESPONSE|>",
        rest_end="<|END_RESPONSE|>",
    ),
    ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>"),
    ReasoningFormat(
        name="granite",
        begin="<think>",
        end="</think>",
        rest_begin="<response>",
        rest_end="</response>",
    ),
    ReasoningFormat(
        name="hunyuan",
        begin="<think>",
        end="</think>",
        rest_begin="<answer>",
        rest_end="</answer>",
    ),
)
# The default: a template must contain only its end marker.
_THINK = ReasoningFormat(name="think", begin="<think>", end="</think>")

REASONING_FORMATS = {item.name: item for item in (*_DETECTED, _THINK)}


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format in a chat template, or None. `harmony` reads its own reasoning."""
    if "<|channel|>" in template and "<|message|>" in template:
        return None
    for reasoning_format in _DETECTED:
        if all(marker in template for marker in reasoning_format.markers):
            return reasoning_format
    return _THINK if _THINK.end in template else None


def reasoning_format_by_name(name: str) -> ReasoningFormat:
    if name not in REASONING_FORMATS:
        known = ", ".join(sorted(REASONING_FORMATS))
        raise RequestError(f"reasoning_parser {name!r} is unknown; use {known}")
    return REASONING_FORMATS[name]


def split_reasoning(
    reasoning_format: ReasoningFormat,
    in_reasoning: bool,
    reader: TextReader,
    writer: DeltaWriter,
    read_rest: Callable[[str], object],
) -> Steps[None]:
    """Write the reasoning and pass the rest to `read_rest`.

    Without an end marker all text is reasoning.
    """
    space = yield from reader.space()
    if (yield from reader.next_is(reasoning_format.begin)) or in_reasoning:
        writer.boundary()
        yield from reader.until((reasoning_format.end,), writer.reasoning)
        writer.boundary()
        space = ""
    if reasoning_format.rest_begin:
        space += yield from reader.space()
        if (yield from reader.next_is(reasoning_format.rest_begin)):
            writer.boundary()
            yield from reader.until((reasoning_format.rest_end,), read_rest)
            space = ""
    read_rest(space)
    yield from reader.until((), read_rest)
