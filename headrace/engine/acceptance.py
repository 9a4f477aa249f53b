"""How often drafts turn out right, measured."""

from headrace.batch import DraftTree

_DEEPEST = 6
_LAST_RANK = 2
_AT_FIRST = 0.5
"""Of a proposer that has never been tried: high enough that it will be."""
_DECAY = 0.98
"""Of what has been seen, for each time that more is."""
_SEQUENCE_DECAY = 0.9
_TRUST = 3.0
"""Trials after which a sequence's own figures weigh as much as those of all sequences."""

_Key = tuple[int, int, int]
"""Confidence, depth, rank among the children of its parent."""


class AcceptanceRates:
    """How often a node follows when its parent does, by confidence, depth and rank: of one proposer, or of it on one sequence."""

    def __init__(self, general: "AcceptanceRates | None" = None) -> None:
        self._general = general
        self._decay = _DECAY if general is None else _SEQUENCE_DECAY
        self._counts: dict[_Key, tuple[float, float]] = {}  # followed, seen

    def rate(self, key: _Key) -> float:
        """Probability that such a node follows its parent. What is not known is taken from all sequences, then from nodes less deep."""
        followed, seen = self._counts.get(key, (0.0, 0.0))
        if self._general is not None:
            prior = self._general.rate(key)
        else:
            confidence, depth, rank = key
            prior = self.rate((confidence, depth - 1, rank)) if depth > 1 else _AT_FIRST / (1 + rank) ** 2
        return (followed + _TRUST * prior) / (seen + _TRUST)

    def values(self, draft: DraftTree) -> list[float]:
        """Probability of each node that it is accepted if it is in the step; never more than its parent's."""
        rates: dict[_Key, float] = {}
        values: list[float] = []
        for key, parent in zip(_places(draft), draft.parents, strict=True):
            rate = rates.get(key)
            if rate is None:
                rate = rates[key] = self.rate(key)
            values.append(rate if parent < 0 else rate * values[parent])
        return values

    def record(self, draft: DraftTree, tokens: list[int]) -> None:
        """These tokens have followed; the nodes of the draft on their way were right, and the other children of these wrong.

        The draft need not have been in the step: as far as tokens are known, it can be seen whether it would have been right.
        """
        places = _places(draft)
        node = -1
        for token in tokens:
            children = [child for child, parent in enumerate(draft.parents) if parent == node]
            if not children:
                return
            for child in children:
                self._count(places[child], draft.tokens[child] == token)
            node = next((child for child in children if draft.tokens[child] == token), -2)  # -2 is no parent

    def _count(self, key: _Key, right: bool) -> None:
        followed, seen = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = (followed * self._decay + right, seen * self._decay + 1)
        if self._general is not None:
            self._general._count(key, right)


def place(confidence: int, depth: int, rank: int) -> _Key:
    """What a node counts as."""
    return confidence, min(depth, _DEEPEST), min(rank, _LAST_RANK)


def _places(draft: DraftTree) -> list[_Key]:
    depths: list[int] = []
    ranks: dict[int, int] = {}
    places: list[_Key] = []
    for parent in draft.parents:
        depth = 1 if parent < 0 else depths[parent] + 1
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        depths.append(depth)
        places.append(place(draft.confidence, depth, rank))
    return places
