"""The work of a climb: the same requests for all rungs, with one system prompt."""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from math import sqrt

from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.loader.load import open_prompt_reader
from headrace.record import frozen

SYSTEM = (
    "You help the people of a small town with its machines. Answer in plain words and in full "
    "sentences. Begin with the answer, then give the reason, then one example from daily life. If "
    "a question has no clear answer, say so and name the fact that decides. Never invent numbers, "
    "names or sources. If the question contains a text or a program, keep its words and its order, "
    "and change only the named part."
)
_THINGS = (
    "water mill",
    "bicycle",
    "pressure cooker",
    "lighthouse",
    "sewing machine",
    "steam engine",
    "printing press",
    "refrigerator",
    "telescope",
    "sundial",
    "canal lock",
    "piano",
    "elevator",
    "wind turbine",
    "compass",
    "clock",
    "radio",
)
_TASKS = (
    "How does a {} work?",
    "Write a Python function that describes a {} as a dictionary, and explain each line.",
    "Correct this text, and change nothing else: The {} were invent long ago, and peoples of every "
    "country has used the {} since. The owner of a {} must takes care of it, else it brake.",
)
_OUTPUTS = (48, 16, 128, 24, 64, 32, 96, 12)
"""Lengths of outputs, in turn: some are ten times as long as others."""
_SMALL = 2 * 10**8
"""Parameters of a model that does all of the work."""
_MIN_REQUESTS = 8
_MAX_LENGTH = 512
_MAX_PROMPT = 1 << 16
_GOLDEN = (sqrt(5) - 1) / 2


@frozen(kw_only=True)
class WorkItem:
    prompt: tuple[int, ...]
    output: int
    """Tokens to generate."""


@frozen(kw_only=True)
class Work:
    items: tuple[WorkItem, ...]
    probes: tuple[tuple[int, ...], ...]
    """Prompts of other requests, to time the first token of a request that is alone."""

    @property
    def tokens(self) -> int:
        return sum(item.output for item in self.items)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def longest(self) -> int:
        return max(len(item.prompt) + item.output for item in self.items)

    @property
    def shared(self) -> int:
        """Tokens with which all prompts begin."""
        columns = zip(*(item.prompt for item in self.items), strict=False)
        return next((i for i, column in enumerate(columns) if len(set(column)) > 1), 0)


def make_work(model: str, checkpoint: Checkpoint, tokenizer: Tokenizer, *, quick: bool) -> Work:
    """Make the requests that fit the model's size and context.

    A model with more parameters gets fewer requests, so that a climb takes minutes.
    """
    parameters = sum(tensor.rows * tensor.cols for tensor in checkpoint.tensors.values())
    share = min(1.0, sqrt(_SMALL / parameters))
    number = max(_MIN_REQUESTS, 8 * int((2 if quick else 6) * share + 0.5))
    length = min(_MAX_LENGTH, checkpoint.spec.max_context)
    reader = open_prompt_reader(model, checkpoint, tokenizer)
    reader.max_model_len = _MAX_PROMPT  # longer prompts than the context's are cut
    try:
        texts = list(islice(questions(), number + len(_TASKS)))
        prompts = []
        for text in texts:
            if "default" in reader.templates:
                roles = [("system", SYSTEM), ("user", text)]
                chat = [{"role": role, "content": content} for role, content in roles]
                ids = reader.read_chat(chat).token_ids
            else:
                ids = reader.read_prompt(f"{SYSTEM}\n\n{text}\n\n").token_ids
            prompts.append(cut(ids, length // 2))
    finally:
        reader.close()

    outputs = [_OUTPUTS[i % len(_OUTPUTS)] // (2 if quick else 1) for i in range(number)]
    return Work(
        items=tuple(
            WorkItem(prompt=prompt, output=min(output, length - len(prompt)))
            for prompt, output in zip(prompts, outputs, strict=False)
        ),
        probes=tuple(prompts[number:]),
    )


def questions() -> Iterator[str]:
    """Yield questions, programs to write and texts to correct, in turn."""
    for number in count():
        thing = _THINGS[number % len(_THINGS)]
        yield _TASKS[number % len(_TASKS)].replace("{}", thing)


def cut(ids: Sequence[int], length: int) -> tuple[int, ...]:
    """Keep the first and the last tokens."""
    if len(ids) <= length:
        return tuple(ids)
    return (*ids[: length // 2], *ids[len(ids) - (length - length // 2) :])


def evenly(number: int) -> list[int]:
    """The indices below `number` in an order whose every beginning is spread evenly."""
    places = (int(number * ((0.5 + i * _GOLDEN) % 1)) for i in count())
    order: dict[int, None] = {}
    for place in places:
        if len(order) == number:
            return list(order)
        order.setdefault(place)
    raise AssertionError
