"""Multiple choice: the option that the model finds likeliest, as evaluation harnesses count it."""

from collections.abc import Sequence
from math import exp
from typing import Literal, NamedTuple, get_args

from headrace.errors import RequestError
from headrace.sessions.session import Node
from headrace.sessions.tree import Score

Measure = Literal["total", "per_token", "per_byte"]
"""Log-probability of an option: its sum, or the sum by its tokens or its bytes of UTF-8."""


class Choice(NamedTuple):
    best: int
    """Number of the chosen option."""
    scores: list[Score]
    probabilities: list[float]
    """Softmax of the measure over the options."""


def choose(
    nodes: Sequence[Node], options: Sequence[Sequence[str]], measure: Measure = "total"
) -> list[Choice]:
    """Return the likeliest option after each node, a question of one session.

    `options` has a list for each node. Each path is computed once, and all options together. Of
    equal ones the first wins. `per_byte` is the measure of normalised accuracies. Raises
    RequestError for no options or an unknown measure, and as `Session.score`.
    """
    if measure not in get_args(Measure):
        raise RequestError(f"measure must be {', '.join(get_args(Measure))}, not {measure!r}")
    if not all(options):
        raise RequestError("options has an empty list; give at least one option for each node")
    if not nodes:
        return []
    choices = []
    for texts, scores in zip(options, nodes[0].session.score(nodes, options), strict=True):
        values = []
        for text, score in zip(texts, scores, strict=True):
            sizes = {"total": 1, "per_token": len(score.token_ids), "per_byte": len(text.encode())}
            values.append(score.total / sizes[measure])
        highest = max(values)
        weights = [exp(value - highest) for value in values]
        total = sum(weights)
        choices.append(
            Choice(values.index(highest), scores, [weight / total for weight in weights])
        )
    return choices
