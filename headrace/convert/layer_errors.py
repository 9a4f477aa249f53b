"""How much of its output each layer loses to quantisation, by itself: which layers are worth more
bits.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from headrace.convert.calibrate import input_products
from headrace.convert.matrices import Tell, chunks
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor

_LAYER = re.compile(r"layers\.(\d+)\.")


def layer_errors(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    quantised: Mapping[str, StoredTensor],
    names: list[str],
    pieces: list[list[int]],
    threads: int,
    tell: Tell,
) -> dict[int, float]:
    """For each layer, |X dW^T| / |X W^T| over its matrices: the error of their outputs where all
    that they read is right.

    X is what the matrices of `tensors` read while these read the pieces of a text, and dW is how
    far those of `quantised` are from them. Last matrices of experts do not count. `tell` hears how
    much is done, from 0 to 1.
    """
    lost: defaultdict[int, float] = defaultdict(float)
    whole: defaultdict[int, float] = defaultdict(float)
    for products, readers in input_products(spec, tensors, pieces, names, threads, tell):
        for name in readers:
            found = _LAYER.match(name)
            layer = int(found[1]) if found else -1
            for weights, rounded in zip(
                chunks(tensors[name]), chunks(quantised[name]), strict=True
            ):
                difference = rounded - weights
                lost[layer] += float(np.einsum("rc,rc->", difference @ products, difference))
                whole[layer] += float(np.einsum("rc,rc->", weights @ products, weights))
    return {
        layer: math.sqrt(lost[layer] / whole[layer]) if whole[layer] else 0.0
        for layer in sorted(whole)
    }
