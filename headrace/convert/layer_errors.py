import math
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from headrace.convert.activation_stats import input_products
from headrace.convert.matrices import ProgressCallback, row_chunks
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
    on_progress: ProgressCallback,
) -> dict[int, float]:
    """Compute |X dW^T| / |X W^T| by layer, for inputs X of the unquantised model.

    Down projections of experts are left out.
    """
    error_squares: defaultdict[int, float] = defaultdict(float)
    output_squares: defaultdict[int, float] = defaultdict(float)
    for products, readers in input_products(spec, tensors, names, pieces, threads, on_progress):
        for name in readers:
            match = _LAYER.match(name)
            layer = int(match[1]) if match else -1
            chunks = zip(row_chunks(tensors[name]), row_chunks(quantised[name]), strict=True)
            for weights, rounded in chunks:
                difference = rounded - weights
                error = np.einsum("rc,rc->", difference @ products, difference)
                error_squares[layer] += float(error)
                output = np.einsum("rc,rc->", weights @ products, weights)
                output_squares[layer] += float(output)
    return {
        layer: math.sqrt(error_squares[layer] / squares) if squares else 0.0
        for layer, squares in sorted(output_squares.items())
    }
