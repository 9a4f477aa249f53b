"""Tree of thoughts: grow texts step by step, and keep the best of each step (Yao et al. 2023)."""

from headrace.sampling_params import SamplingParams
from headrace.search.values import Value, is_complete, likelihood, valued, with_logprobs
from headrace.sessions.session import Node


def tree_of_thoughts(
    root: Node,
    steps: int,
    params: SamplingParams | None = None,
    *,
    branching: int = 4,
    breadth: int = 2,
    value: Value = likelihood,
) -> list[Node]:
    """Return the `breadth` best nodes after up to `steps` steps, the best first.

    A step samples `branching` continuations of each node together, values them together, and
    closes all but the best. `params` say how long a thought is, for example with a stop string.
    Complete texts stay among the candidates with their values. Raises as `Session.sample`.
    """
    params = with_logprobs(params)
    frontier = [(0.0, root)]
    for _ in range(steps):
        growing = [node for _, node in frontier if not is_complete(node)]
        if not growing:
            break
        grown = [
            node for group in root.session.sample(growing, branching, params) for node in group
        ]
        candidates = [pair for pair in frontier if is_complete(pair[1])]
        candidates += zip(valued(value, grown), grown, strict=True)
        candidates.sort(key=lambda pair: -pair[0])
        frontier = candidates[:breadth]
        for _, node in candidates[breadth:]:
            node.close()
    return [node for _, node in frontier]
