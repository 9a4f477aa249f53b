"""Groups the neurons of an FFN into experts by their activations.

CMoE (Pei et al. 2025): neurons that are always useful are shared, and the others are clustered by
the tokens on which they are active. All clusters have the same size.
"""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import Floats
from headrace.record import frozen

Neurons = NDArray[np.int64]

_ACTIVE_SHARE = 0.1
"""Share of the neurons that count as active on a token: the largest activations."""
_MAX_TOKENS = 2048
"""Tokens on which neurons are compared."""
_ROUNDS, _SWAP_ROUNDS = 8, 20


@frozen(eq=False)
class NeuronGroups:
    shared: Neurons
    """Neurons of the shared expert, ascending."""
    routed: tuple[Neurons, ...]
    """Neurons of each routed expert, ascending; all have the same number."""


def group_neurons(
    hidden: Floats, weights: Floats, num_experts: int, num_shared: int
) -> NeuronGroups:
    """Group neurons into `num_experts` of equal size, of which `num_shared` are shared.

    `hidden` [tokens, neurons] are activations, `weights` [neurons] the norms of the columns of
    `down`. Shared neurons have the largest root mean square of both multiplied.
    """
    width = hidden.shape[1] // num_experts
    contribution = np.einsum("tn,tn->n", hidden, hidden) * weights**2
    order = np.argsort(-contribution, kind="stable")
    others = order[num_shared * width :]

    active = _active(hidden[:: -(-len(hidden) // _MAX_TOKENS)])
    cluster = _balanced_clusters(active[:, others].T.astype(np.float32), width)
    return NeuronGroups(
        np.sort(order[: num_shared * width]),
        tuple(np.sort(others[cluster == c]) for c in range(num_experts - num_shared)),
    )


def _active(hidden: Floats) -> NDArray[np.bool_]:
    sizes = np.abs(hidden)
    last = max(1, round(_ACTIVE_SHARE * sizes.shape[1]))
    threshold = np.partition(sizes, -last, axis=1)[:, -last]
    return sizes >= threshold[:, None]


def _balanced_clusters(features: Floats, size: int) -> NDArray[np.int64]:
    """The cluster of each row, by k-means with clusters of `size` rows.

    The first rows are the first centroids.
    """
    centroids = features[: len(features) // size]
    squares = np.einsum("nf,nf->n", features, features)
    cluster = np.zeros(len(features), np.int64)
    for _ in range(_ROUNDS):
        distance = squares[:, None] - 2 * features @ centroids.T
        distance += np.einsum("cf,cf->c", centroids, centroids)
        before, cluster = cluster, _assign(distance, size)
        if np.array_equal(before, cluster):
            break
        centroids = np.stack([features[cluster == c].mean(0) for c in range(len(centroids))])
    return cluster


def _assign(distance: Floats, size: int) -> NDArray[np.int64]:
    """Give each row a cluster with free places, nearest pairs first, then swap pairs that gain."""
    num_rows, num_clusters = distance.shape
    cluster, free = [-1] * num_rows, [size] * num_clusters
    for pair in np.argsort(distance, axis=None, kind="stable").tolist():
        row, c = divmod(pair, num_clusters)
        if cluster[row] < 0 and free[c]:
            cluster[row] = c
            free[c] -= 1
    assigned = np.array(cluster, np.int64)
    for _ in range(_SWAP_ROUNDS):
        swaps = [_swap(distance, assigned, a, b) for a, b in combinations(range(num_clusters), 2)]
        if not any(swaps):
            break
    return assigned


def _swap(distance: Floats, cluster: NDArray[np.int64], a: int, b: int) -> int:
    """Swap rows of two clusters in place, and return the number of pairs."""
    in_a, in_b = np.flatnonzero(cluster == a), np.flatnonzero(cluster == b)
    gain_a = distance[in_a, a] - distance[in_a, b]
    gain_b = distance[in_b, b] - distance[in_b, a]
    best_a, best_b = np.argsort(-gain_a, kind="stable"), np.argsort(-gain_b, kind="stable")
    # Rounding may never make a swap look good both ways.
    tolerance = 1e-5 * float(np.abs(distance).max())
    count = int(np.count_nonzero(gain_a[best_a] + gain_b[best_b] > tolerance))
    cluster[in_a[best_a[:count]]] = b
    cluster[in_b[best_b[:count]]] = a
    return count
