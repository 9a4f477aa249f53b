"""Reasoning before an answer, between markers."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import RequestError
from headrace.server.output_parsers.delta_writer import DeltaWriter
from headrace.server.output_parsers.text_reader import Steps, TextReader


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of a model's reasoning, which stands before its answer, and of the answer where
    that has some, too.
    """

    name: str
    begin: str
    end: str
    answer_begin: str = ""
    answer_end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(
            text for text in (self.begin, self.end, self.answer_begin, self.answer_end) if text
        )

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning: with the marker that begins it. The last few
        characters of the prompt will do.
        """
        return prompt.rstrip().endswith(self.begin)


# In the order in which a template is asked. All of a record's texts must be in the template, of the
# plainest only the end.
_KNOWN = (
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat(
        "command",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("granite", "<think>", "</think>", "<response>", "</response>"),
    ReasoningFormat("hunyuan", "<think>", "</think>", "<answer>", "</answer>"),
)
_THINK = ReasoningFormat("think", "<think>", "</think>")

REASONING_FORMATS = {
    reasoning_format.name: reasoning_format for reasoning_format in (*_KNOWN, _THINK)
}
"""All kinds of reasoning by their names, which `--reasoning-parser` takes."""


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """The markers of reasoning that a chat template knows; None where it knows none, or writes
    channels.
    """
    if "<|channel|>" in template and "<|message|>" in template:
        return None
    found = next(
        (
            reasoning_format
            for reasoning_format in _KNOWN
            if all(text in template for text in reasoning_format.markers)
        ),
        None,
    )
    return found or (_THINK if _THINK.end in template else None)


def reasoning_format_by_name(name: str) -> ReasoningFormat:
    """A kind of reasoning by its name. Raises RequestError for an unknown one."""
    if name not in REASONING_FORMATS:
        raise RequestError(
            f"there is no kind of reasoning named {name!r}: use one of "
            f"{', '.join(sorted(REASONING_FORMATS))}"
        )
    return REASONING_FORMATS[name]


def split_reasoning(
    reasoning_format: ReasoningFormat,
    in_reasoning: bool,
    reader: TextReader,
    writer: DeltaWriter,
    read_rest: Callable[[str], object],
) -> Steps[None]:
    """Write the reasoning at the beginning of a text, and give the rest to `answer`.

    `inside`: the text begins within the reasoning. Without an end marker all of it is reasoning.
    """
    space = yield from reader.space()
    if (yield from reader.next_is(reasoning_format.begin)) or in_reasoning:
        writer.boundary()
        yield from reader.until((reasoning_format.end,), writer.reasoning)
        writer.boundary()
        space = ""
    if reasoning_format.answer_begin:
        space += yield from reader.space()
        if (yield from reader.next_is(reasoning_format.answer_begin)):
            writer.boundary()
            yield from reader.until((reasoning_format.answer_end,), read_rest)
            space = ""
    read_rest(space)
    yield from reader.until((), read_rest)
