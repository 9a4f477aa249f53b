"""AWQ (Lin et al. 2023): the columns that read large activations are scaled up before they are
rounded, so that their errors shrink.

A column times s, and its input divided by s, leaves the model as it is, while the column's error in
the output becomes smaller by about s. Of the powers s = a^alpha of the activations a, with alpha
from 0 to 1, the one is taken whose rounded matrices miss their outputs by the least. a is the root
of the mean square of a column; the paper takes the mean magnitude. The ranges of groups are then
clipped where that lessens the errors of columns times their mean squares.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.convert.calibrate import input_products
from headrace.convert.matrices import Tell, chunks
from headrace.convert.scaling import ScalingGroup, Scalings, scaling_groups
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.quant.rounding import round_to_nearest
from headrace.quant.spec import QuantSpec, dequantise_rows

Floats = NDArray[np.float32]

_ALPHAS = np.linspace(0, 1, 21, dtype=np.float32)
_LEAST = np.float32(1e-4)
"""Of the geometric mean of activations: what a column counts that has less, or nothing."""


def awq(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    to: QuantSpec,
    pieces: list[list[int]],
    threads: int,
    tell: Tell,
) -> tuple[Scalings, dict[str, Floats]]:
    """The scalings, and for the matrices the mean squares of what their columns read once it is
    scaled [cols].

    Matrices whose input nothing can scale have the mean squares alone, the last ones of experts
    nothing.
    """
    groups = scaling_groups(trace_model(spec, tensors), names)
    group_of = {name: group for group in groups for name in group.readers}
    scalings = Scalings()
    mean_squares: dict[str, Floats] = {}
    for products, readers in input_products(spec, tensors, pieces, names, threads, tell):
        scale = np.ones(len(products), np.float32)
        if group := group_of.get(readers[0]):
            factors = _best_factors(group, products, [tensors[name] for name in readers], to)
            scalings.add(group, factors)
            scale = factors[group.columns]
        mean_squares.update(
            dict.fromkeys(readers, (np.diag(products) / np.square(scale)).astype(np.float32))
        )
    return scalings, mean_squares


def _best_factors(
    group: ScalingGroup, products: Floats, matrices: list[StoredTensor], to: QuantSpec
) -> Floats:
    """The factors whose rounded matrices have the least error tr(dW H dW^T) in sum, with H the mean
    products X^T X of their input.
    """
    activations = np.sqrt(
        np.bincount(group.columns, np.diag(products)) / np.bincount(group.columns)
    ).astype(np.float32)
    seen = activations[activations > 0]
    if not len(seen):
        return np.ones_like(activations)
    relative = np.maximum(activations / np.exp(np.log(seen).mean()), _LEAST)
    candidates: list[Floats] = [relative**alpha for alpha in _ALPHAS]
    errors = np.zeros(len(candidates))
    for matrix in matrices:
        for weights in chunks(matrix):
            errors += [
                _error(weights, factors[group.columns], products, to) for factors in candidates
            ]
    return candidates[int(errors.argmin())]


def _error(weights: Floats, scale: Floats, products: Floats, to: QuantSpec) -> float:
    difference = (
        dequantise_rows(to, round_to_nearest(weights * scale, to, clip=False)) / scale - weights
    )
    return float(np.einsum("rc,rc->", difference @ products, difference))
