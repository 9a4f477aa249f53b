"""Measured acceptance rates of draft nodes."""

from collections.abc import Sequence

from headrace.batch import DraftTree

_DEEPEST = 6
"""Depth from which all nodes are counted together."""
_LAST_RANK = 2
"""Rank among siblings from which all nodes are counted together."""
_DECAY = 0.98
"""Factor on earlier observations at each new one, over all sequences."""
_SEQUENCE_DECAY = 0.9
"""The same factor for one sequence."""
_TRUST = 3.0
"""Observations after which a rate's own figures weigh as much as the rate that it starts from."""

_Key = tuple[int, int, int]
"""Confidence of the tree, depth of the node, and its rank among the children of its parent."""


class AcceptanceRates:
    """Rates at which a node of one proposer is right if its parent is, by confidence, depth and
    rank.

    With `general`, the rates over all sequences, these are the rates on one sequence: they start
    from the general ones, and what they record is recorded there too.
    """

    def __init__(
        self, general: "AcceptanceRates | None" = None, prior: Sequence[float] = (0.5,)
    ) -> None:
        """`prior` has the rate of the likeliest child by confidence, before anything is observed,
        where there are no general ones.
        """
        self._general = general
        self._prior = prior
        self._decay = _DECAY if general is None else _SEQUENCE_DECAY
        self._counts: dict[_Key, tuple[float, float]] = {}  # right, observed

    def rate(self, key: _Key) -> float:
        """Probability that a node is right if its parent is.

        It starts from the rate over all sequences, which starts from the rate at one depth less,
        and at last from `prior`.
        """
        right, observed = self._counts.get(key, (0.0, 0.0))
        confidence, depth, rank = key
        if self._general is not None:
            prior = self._general.rate(key)
        elif depth > 1:
            prior = self.rate((confidence, depth - 1, rank))
        else:
            prior = self._prior[min(confidence, len(self._prior) - 1)] / (1 + rank) ** 2
        return (right + _TRUST * prior) / (observed + _TRUST)

    def values(self, draft: DraftTree) -> list[float]:
        """Probability of each node that it is accepted if it runs; never more than its parent's."""
        rates: dict[_Key, float] = {}
        values: list[float] = []
        for key, parent in zip(_places(draft), draft.parents, strict=True):
            rate = rates.get(key)
            if rate is None:
                rate = rates[key] = self.rate(key)
            values.append(rate if parent < 0 else rate * values[parent])
        return values

    def record(self, draft: DraftTree, tokens: list[int]) -> None:
        """Count the nodes along `tokens`, which the sequence went on with, as right, and their
        siblings as wrong.

        The draft need not have run: the tokens decide as far as they go.
        """
        places = _places(draft)
        node = -1
        for token in tokens:
            children = [child for child, parent in enumerate(draft.parents) if parent == node]
            if not children:
                return
            for child in children:
                self._count(places[child], draft.tokens[child] == token)
            node = next(
                (child for child in children if draft.tokens[child] == token), -2
            )  # -2 is no parent

    def _count(self, key: _Key, right: bool) -> None:
        before, observed = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = (before * self._decay + right, observed * self._decay + 1)
        if self._general is not None:
            self._general._count(key, right)


def place(confidence: int, depth: int, rank: int) -> _Key:
    """The key that a node is counted under."""
    return confidence, min(depth, _DEEPEST), min(rank, _LAST_RANK)


def _places(draft: DraftTree) -> list[_Key]:
    """The key of each node."""
    depths: list[int] = []
    ranks: dict[int, int] = {}
    places: list[_Key] = []
    for parent in draft.parents:
        depth = 1 if parent < 0 else depths[parent] + 1
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        depths.append(depth)
        places.append(place(draft.confidence, depth, rank))
    return places
