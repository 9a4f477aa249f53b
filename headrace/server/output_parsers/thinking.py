"""Reasoning before an answer, between markers."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import RequestError
from headrace.server.output_parsers.reader import Reader, Steps
from headrace.server.output_parsers.writer import Writer


@dataclass(frozen=True)
class Thinking:
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

    def begins_inside(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning: with the marker that begins it. The last few
        characters of the prompt will do.
        """
        return prompt.rstrip().endswith(self.begin)


# In the order in which a template is asked. All of a record's texts must be in the template, of the
# plainest only the end.
_KNOWN = (
    Thinking("mistral", "[THINK]", "[/THINK]"),
    Thinking(
        "command",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
    Thinking("seed_oss", "<seed:think>", "</seed:think>"),
    Thinking("granite", "<think>", "</think>", "<response>", "</response>"),
    Thinking("hunyuan", "<think>", "</think>", "<answer>", "</answer>"),
)
_THINK = Thinking("think", "<think>", "</think>")

THINKING = {thinking.name: thinking for thinking in (*_KNOWN, _THINK)}
"""All kinds of reasoning by their names, which `--reasoning-parser` takes."""


def detect_thinking(template: str) -> Thinking | None:
    """The markers of reasoning that a chat template knows; None where it knows none, or writes
    channels.
    """
    if "<|channel|>" in template and "<|message|>" in template:
        return None
    found = next(
        (thinking for thinking in _KNOWN if all(text in template for text in thinking.markers)),
        None,
    )
    return found or (_THINK if _THINK.end in template else None)


def named_thinking(name: str) -> Thinking:
    """A kind of reasoning by its name. Raises RequestError for an unknown one."""
    if name not in THINKING:
        raise RequestError(
            f"there is no kind of reasoning named {name!r}: use one of "
            f"{', '.join(sorted(THINKING))}"
        )
    return THINKING[name]


def split_thinking(
    thinking: Thinking,
    inside: bool,
    reader: Reader,
    writer: Writer,
    answer: Callable[[str], object],
) -> Steps[None]:
    """Write the reasoning at the beginning of a text, and give the rest to `answer`.

    `inside`: the text begins within the reasoning. Without an end marker all of it is reasoning.
    """
    space = yield from reader.space()
    if (yield from reader.next_is(thinking.begin)) or inside:
        writer.boundary()
        yield from reader.until((thinking.end,), writer.reasoning)
        writer.boundary()
        space = ""
    if thinking.answer_begin:
        space += yield from reader.space()
        if (yield from reader.next_is(thinking.answer_begin)):
            writer.boundary()
            yield from reader.until((thinking.answer_end,), answer)
            space = ""
    answer(space)
    yield from reader.until((), answer)
