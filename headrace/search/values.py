"""Values of nodes, and the end of a search's path."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp

from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.sessions.session import Node

Value = Callable[[list[Node]], Sequence[float]]
"""Returns a number for each node of a list; higher is better."""


def likelihood(nodes: list[Node]) -> list[float]:
    """Return the geometric mean of the probabilities of each node's own tokens, 0 to 1.

    The nodes must be sampled with `logprobs`. Raises RequestError for other nodes.
    """
    values = []
    for node in nodes:
        output = node.output
        if output is None or output.cumulative_logprob is None or not output.token_ids:
            raise RequestError(f"node {node.name} has no log-probabilities; sample with logprobs=0")
        values.append(exp(output.cumulative_logprob / len(output.token_ids)))
    return values


def valued(value: Value, nodes: list[Node]) -> list[float]:
    """Return the values of nodes. Raises RequestError if `value` gives another number of them."""
    values = [float(number) for number in value(nodes)]
    if len(values) != len(nodes):
        raise RequestError(
            f"value returned {len(values)} numbers for {len(nodes)} nodes; return one for each"
        )
    return values


def with_logprobs(params: SamplingParams | None) -> SamplingParams:
    """Return the parameters with the log-probabilities that `likelihood` reads."""
    params = SamplingParams(temperature=1, max_tokens=32) if params is None else params
    return params if params.logprobs is not None else replace(params, logprobs=0)


def is_complete(node: Node) -> bool:
    """Whether the model has ended the text of a node, or the context is full.

    A stop string or a stop token only ends a step of a search.
    """
    output = node.output
    if node.num_tokens >= node.session.host.max_model_len:
        return True
    return output is not None and output.finish_reason == "stop" and output.stop_reason is None
