"""Best of n: sample several continuations, and keep the best."""

from headrace.sampling_params import SamplingParams
from headrace.search.values import Value, likelihood, valued, with_logprobs
from headrace.sessions.session import Node


def best_of(
    node: Node, n: int, params: SamplingParams | None = None, value: Value = likelihood
) -> Node:
    """Sample `n` continuations of a node, and return the one with the highest value.

    The others are closed. Of equal ones the first wins. `params` is 32 tokens at temperature 1 by
    default. Raises as `Session.sample`.
    """
    children = node.sample(n, with_logprobs(params))
    values = valued(value, children)
    best = children[values.index(max(values))]
    for child in children:
        if child is not best:
            child.close()
    return best
