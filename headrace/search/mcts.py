"""Monte Carlo tree search over texts, with UCT (Kocsis and Szepesvari 2006)."""

from dataclasses import dataclass, field
from math import log, sqrt

from headrace.sampling_params import SamplingParams
from headrace.search.values import Value, is_complete, likelihood, valued, with_logprobs
from headrace.sessions.session import Node


@dataclass(eq=False)
class _TreeNode:
    """A node with the visits and the sum of the values below it."""

    node: Node
    parent: "_TreeNode | None"
    value: float = 0.0
    visits: int = 0
    total: float = 0.0
    children: "list[_TreeNode]" = field(default_factory=list)

    def uct(self, exploration: float) -> float:
        assert self.parent is not None
        mean = self.total / self.visits
        return mean + exploration * sqrt(log(self.parent.visits) / self.visits)

    def visit(self, value: float) -> None:
        """Count a value here and in all nodes above."""
        place: _TreeNode | None = self
        while place is not None:
            place.visits += 1
            place.total += value
            place = place.parent


def mcts(
    root: Node,
    simulations: int,
    params: SamplingParams | None = None,
    *,
    branching: int = 4,
    value: Value = likelihood,
    exploration: float = 1.4,
) -> Node:
    """Search below a node, and return the best node found: a complete one, if there is any.

    A simulation goes down to the child with the highest upper bound until it finds a node without
    children, samples `branching` children there, and values them together. A complete node is
    counted again. Values should lie between 0 and 1. The other nodes stay open, and the kept KV
    stays bounded. Raises as `Session.sample`.
    """
    params = with_logprobs(params)
    start = _TreeNode(root, None)
    found: list[_TreeNode] = []
    for _ in range(simulations):
        place = start
        while place.children:
            place = max(place.children, key=lambda child: child.uct(exploration))
        if is_complete(place.node):
            place.visit(place.value)
            continue
        nodes = place.node.sample(branching, params)
        for node, number in zip(nodes, valued(value, nodes), strict=True):
            child = _TreeNode(node=node, parent=place, value=number)
            place.children.append(child)
            child.visit(number)
        found += place.children
    if not found:
        return root
    return max(found, key=lambda child: (is_complete(child.node), child.value)).node
