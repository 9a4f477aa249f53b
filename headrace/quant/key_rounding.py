"""Rounds int4 keys so that their products with queries lose little.

A rounded number of a key is wrong by up to half a step. The products q . k that a key enters are
what counts, and queries use few directions. So the numbers of a key are rounded one after another,
and each takes back what the errors before it would add to products (as GPTQ, Frantar et al. 2022,
does for weights). How much it takes back depends on the mean of q q^T, which is measured once for
a model. Reading such keys is the same as reading others.

Keys of a head lie around a centre. A key is stored without it, since a softmax does not change if
the same is added to all scores. The range of what is left is narrower.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.config import KeyRounding
from headrace.quant.kv import hadamard, round_bf16

_DAMPING = 0.01
"""Share of the mean square of queries that is added to it in every direction."""


def key_rounding(
    layer: int, queries: NDArray[np.float64], centre: NDArray[np.float64]
) -> KeyRounding | None:
    """Make the rounding of a layer's keys.

    Args:
        queries: mean of q q^T over the queries of each KV head, [KV heads, key size, key size].
        centre: mean of the keys, [KV heads, key size]; zeros if scores may not change.

    Returns None if a number is not finite, or if a head has no queries but zeros.
    """
    size = centre.shape[1]
    rotation = hadamard(size)
    turned = rotation @ queries @ rotation
    scale = np.trace(turned, axis1=1, axis2=2)[:, None, None] / size
    if not (np.isfinite(turned).all() and np.isfinite(centre).all() and (scale > 0).all()):
        return None
    # W = L^T L, with L lower: e^T W e is a sum of squares (e_i + sum of L_ij / L_ii e_j, j < i)^2.
    damped = turned / scale + _DAMPING * np.eye(size)
    lower = np.linalg.cholesky(damped[:, ::-1, ::-1])[:, ::-1, ::-1].transpose(0, 2, 1)
    factors = lower / np.diagonal(lower, axis1=1, axis2=2)[:, :, None]
    feedback = round_bf16(np.triu(factors.transpose(0, 2, 1), 1))
    return KeyRounding(layer, centre.astype(np.float32), feedback.astype(np.float32))
