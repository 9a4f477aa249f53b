"""Measured acceptance rates of draft nodes."""

from collections.abc import Sequence

from headrace.batch import DraftTree

_MAX_DEPTH = 6
_MAX_RANK = 2
_DECAY = 0.98
"""Factor on earlier observations."""
_SEQUENCE_DECAY = 0.9
_PRIOR_WEIGHT = 3.0
"""Observations that a prior counts as."""

_NodeClass = tuple[int, int, int]
"""Confidence, depth, and rank among its siblings; a confidence of its own implies a node's rank.
"""


class AcceptanceRates:
    """Rates at which a draft node is right if its parent is, by node class.

    Rates on one sequence start from the `general` rates, which record their observations too.
    """

    def __init__(
        self, general: "AcceptanceRates | None" = None, prior: Sequence[float] = (0.5,)
    ) -> None:
        """`prior[confidence]` is the general rate of the likeliest child, at first."""
        self._general = general
        self._prior = prior
        self._decay = _DECAY if general is None else _SEQUENCE_DECAY
        self._is_by_node = False
        self._counts: dict[_NodeClass, tuple[float, float]] = {}  # right, observed

    @property
    def is_by_node(self) -> bool:
        """Whether drafts had a confidence for each node."""
        return (self._general or self)._is_by_node

    def rate(self, key: _NodeClass) -> float:
        """Probability that a node is right if its parent is.

        The prior is the general rate, then the rate at the depth above.
        """
        right, observed = self._counts.get(key, (0.0, 0.0))
        confidence, depth, rank = key
        if self._general is not None:
            prior = self._general.rate(key)
        elif depth > 1:
            prior = self.rate((confidence, depth - 1, rank))
        else:
            prior = self._prior[min(confidence, len(self._prior) - 1)] / (1 + rank) ** 2
        return (right + _PRIOR_WEIGHT * prior) / (observed + _PRIOR_WEIGHT)

    def values(self, draft: DraftTree) -> list[float]:
        rates: dict[_NodeClass, float] = {}
        values: list[float] = []
        for key, parent in zip(_node_classes(draft), draft.parents, strict=True):
            rate = rates.get(key)
            if rate is None:
                rate = rates[key] = self.rate(key)
            values.append(rate if parent < 0 else rate * values[parent])
        return values

    def record(self, draft: DraftTree, tokens: list[int]) -> None:
        """Count the nodes along the new `tokens` as right and their siblings as wrong.

        The draft need not have run.
        """
        keys = _node_classes(draft)
        # Rates by depth and rank alone, to decide on depths before a draft.
        others = None
        if isinstance(draft.confidence, list):
            others = _node_classes(draft._replace(confidence=0))
            (self._general or self)._is_by_node = True
        node = -1
        for token in tokens:
            children = [child for child, parent in enumerate(draft.parents) if parent == node]
            right = [child for child in children if draft.tokens[child] == token]
            for child in children:
                self._count(keys[child], child in right)
                if others and others[child] != keys[child]:
                    self._count(others[child], child in right)
            if not right:
                return
            node = right[0]

    def _count(self, key: _NodeClass, is_right: bool) -> None:
        right, observed = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = (right * self._decay + is_right, observed * self._decay + 1)
        if self._general is not None:
            self._general._count(key, is_right)


def node_class(confidence: int, depth: int, rank: int) -> _NodeClass:
    return confidence, min(depth, _MAX_DEPTH), min(rank, _MAX_RANK)


def _node_classes(draft: DraftTree) -> list[_NodeClass]:
    depths: list[int] = []
    num_children: dict[int, int] = {}
    classes: list[_NodeClass] = []
    for parent in draft.parents:
        depth = 1 if parent < 0 else depths[parent] + 1
        rank = num_children.get(parent, 0)
        num_children[parent] = rank + 1
        depths.append(depth)
        if isinstance(draft.confidence, list) and (confidence := draft.confidence[len(classes)]):
            classes.append(node_class(confidence, depth, 0))
        else:
            tree_class = 0 if isinstance(draft.confidence, list) else draft.confidence
            classes.append(node_class(tree_class, depth, rank))
    return classes
