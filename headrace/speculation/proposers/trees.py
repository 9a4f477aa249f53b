"""Builds and prunes draft trees."""

from collections.abc import Iterable

from headrace.batch import DraftTree


class Tree:
    """A draft tree under construction. Siblings have different tokens."""

    def __init__(self, budget: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._budget = budget
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def add(self, parent: int, token: int) -> int | None:
        """The child of `parent` with this token; None if the budget is spent."""
        node = self._nodes.get((parent, token))
        if node is None and len(self.tokens) < self._budget:
            node = self._nodes[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add_chain(self, tokens: Iterable[int], parent: int = -1) -> list[int]:
        nodes: list[int] = []
        for token in tokens:
            node = self.add(nodes[-1] if nodes else parent, token)
            if node is None:
                break
            nodes.append(node)
        return nodes


def merge(chains: list[list[int]], budget: int, confidence: int = 0) -> DraftTree:
    """Merge chains level by level. Chains that agree make a deeper tree."""
    tree = Tree(budget)
    ends = [-1] * len(chains)
    for depth in range(max(map(len, chains), default=0)):
        for i, chain in enumerate(chains):
            if depth < len(chain):
                node = tree.add(ends[i], chain[depth])
                if node is None:
                    return DraftTree(
                        tokens=tree.tokens, parents=tree.parents, confidence=confidence
                    )
                ends[i] = node
    return DraftTree(tokens=tree.tokens, parents=tree.parents, confidence=confidence)


def prune(draft: DraftTree, kept: list[int]) -> DraftTree:
    """The tree of the `kept` nodes, ascending and with their parents."""
    if len(kept) == len(draft.tokens):
        return draft
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    return draft._replace(
        tokens=[draft.tokens[node] for node in kept],
        parents=[place[draft.parents[node]] for node in kept],
        confidence=(
            [draft.confidence[node] for node in kept]
            if isinstance(draft.confidence, list)
            else draft.confidence
        ),
        probabilities=None if draft.probabilities is None else draft.probabilities[kept],
    )
