"""Self-consistency: sample several answers, and take the most frequent one (Wang et al. 2022)."""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.sessions.session import Node

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Vote(NamedTuple):
    answer: str
    share: float
    """Part of the sampled texts that gave this answer, 0 to 1."""
    nodes: list[Node]
    """The nodes that gave it."""


def last_number(text: str) -> str | None:
    """Return the last number of a text without commas, or None."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def majority(
    node: Node,
    n: int,
    params: SamplingParams | None = None,
    answer: Callable[[str], str | None] = last_number,
) -> Vote:
    """Sample `n` texts below a node, and return the most frequent answer.

    `answer` finds the answer of a text; None is no answer. Of equally frequent answers the first
    one wins. The other nodes are closed. Raises RequestError if no text has an answer.
    """
    children = node.sample(n, params)
    answers = [answer(child.text) for child in children]
    counts = Counter(found for found in answers if found is not None)
    if not counts:
        for child in children:
            child.close()
        raise RequestError(
            f"none of the {n} texts has an answer; sample more tokens, or pass another answer"
        )
    ((best, votes),) = counts.most_common(1)
    winners = [child for child, found in zip(children, answers, strict=True) if found == best]
    for child in children:
        if child not in winners:
            child.close()
    return Vote(best, votes / n, winners)
