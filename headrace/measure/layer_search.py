"""Searches for the layers of a model that draft best: a knapsack of time against acceptance."""

from collections import Counter
from collections.abc import Callable, Sequence

from headrace.checkpoint.load import Checkpoint
from headrace.measure.progress import ProgressCallback
from headrace.model import trace_model
from headrace.program.op import StepSize

_ROUNDS = 8
"""A round drops an eighth of all layers, at least one."""
_LEAST_SHARE = 4
"""The search ends at a quarter of the layers: fewer seldom predict a token."""


def search_layers(
    checkpoint: Checkpoint,
    acceptance: Callable[[Sequence[int]], float],
    on_progress: ProgressCallback,
) -> list[tuple[int, ...]]:
    """Return sets of layers that draft, from many to few.

    `acceptance` measures the share of tokens that a set predicts. Each round measures every set
    with one layer less, and drops the layers that cost the least acceptance for their time
    (greedy, as for a knapsack). All layers of a set have read their bytes at the same rate, so
    time is in bytes.
    """
    nbytes = layer_bytes(checkpoint)
    num_layers = checkpoint.spec.num_layers
    kept, sets = list(range(num_layers)), []
    dropped_in_round = max(1, num_layers // _ROUNDS)
    while len(kept) - dropped_in_round >= max(1, num_layers // _LEAST_SHARE):
        whole = 1.0 if len(kept) == num_layers else acceptance(kept)
        price = {}
        for number, layer in enumerate(kept):
            on_progress(f"sets of {len(kept) - 1} layers", number / len(kept))
            rest = [other for other in kept if other != layer]
            price[layer] = (whole - acceptance(rest)) / nbytes[layer]
        cheapest = sorted(kept, key=lambda layer: price[layer])[:dropped_in_round]
        kept = [layer for layer in kept if layer not in cheapest]
        sets.append(tuple(kept))
    return sets


def layer_bytes(checkpoint: Checkpoint) -> Counter[int]:
    """Bytes of weights that each layer reads to decode a token."""
    total: Counter[int] = Counter()
    step = StepSize(((0, 1),), 1, 0)
    for op in trace_model(checkpoint.spec, checkpoint.tensors).ops:
        for weight in op.weights():
            word, _, rest = weight.name.partition(".")
            if word == "layers":
                total[int(rest.partition(".")[0])] += op.bytes(step)
                break
    return total
