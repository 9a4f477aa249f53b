"""AWQ (Lin et al. 2023): scale up the columns with large activations before rounding.

The factors are a^alpha for the root mean square a of a column's input (the paper takes the mean
magnitude). Of 21 alphas from 0 to 1, the best is searched on some rows of each matrix: first
among every fourth, then next to the best of them.
"""

from collections.abc import Mapping

import numpy as np

from headrace.convert.activation_stats import input_products
from headrace.convert.matrices import ProgressCallback
from headrace.convert.scaling import ScalingGroup, Scalings, scaling_groups
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor
from headrace.quant.rounding import round_to_nearest
from headrace.quant.spec import QuantSpec, dequantise_rows

_STEPS = 20
"""Steps of the alphas from 0 to 1."""
_COARSE_STEP = 4
_MAX_ROWS = 1024
"""Rows of a matrix that judge an alpha; 512 cost quality (docs/use/quantise.md)."""
_MIN_ACTIVATION = np.float32(1e-4)
"""Lower bound relative to the geometric mean."""


def awq(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    target: QuantSpec,
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
) -> tuple[Scalings, dict[str, Floats]]:
    """Choose the scalings, and mean squares [cols] of scaled inputs by matrix."""
    groups = scaling_groups(trace_model(spec, tensors), names)
    group_of = {name: group for group in groups for name in group.readers}
    scalings = Scalings()
    mean_squares: dict[str, Floats] = {}

    for products, readers in input_products(spec, tensors, names, pieces, threads, on_progress):
        scale = np.ones(len(products), np.float32)
        if group := group_of.get(readers[0]):
            factors = _best_factors(group, products, [tensors[name] for name in readers], target)
            scalings.add(group, factors)
            scale = factors[group.columns]
        squares = (np.diag(products) / np.square(scale)).astype(np.float32)
        mean_squares.update(dict.fromkeys(readers, squares))
    return scalings, mean_squares


def _best_factors(
    group: ScalingGroup, products: Floats, matrices: list[StoredTensor], target: QuantSpec
) -> Floats:
    activations = np.sqrt(
        np.bincount(group.columns, np.diag(products)) / np.bincount(group.columns)
    ).astype(np.float32)
    nonzero = activations[activations > 0]
    if not len(nonzero):
        return np.ones_like(activations)
    relative = np.maximum(activations / np.exp(np.log(nonzero).mean()), _MIN_ACTIVATION)

    rows = [_judging_rows(matrix) for matrix in matrices]
    errors: dict[int, float] = {}

    def factors_of(step: int) -> Floats:
        factors: Floats = relative ** np.float32(step / _STEPS)
        return factors

    def best_of(steps: range) -> int:
        for step in steps:
            if step not in errors:
                scale = factors_of(step)[group.columns]
                errors[step] = sum(
                    matrix.rows / len(weights) * _output_error(weights, scale, products, target)
                    for matrix, weights in zip(matrices, rows, strict=True)
                )
        return min(errors, key=lambda step: (errors[step], step))

    best = best_of(range(0, _STEPS + 1, _COARSE_STEP))
    near = range(max(0, best - _COARSE_STEP + 1), min(_STEPS, best + _COARSE_STEP - 1) + 1)
    return factors_of(best_of(near))


def _judging_rows(matrix: StoredTensor) -> Floats:
    """Rows at equal distances, which stand for all rows."""
    count = min(matrix.rows, _MAX_ROWS)
    return matrix.dequantise_rows(np.arange(count) * matrix.rows // count)


def _output_error(weights: Floats, scale: Floats, products: Floats, target: QuantSpec) -> float:
    rounded = round_to_nearest(weights * scale, target, clip=False)
    difference = dequantise_rows(target, rounded) / scale - weights
    return float(np.einsum("rc,rc->", difference @ products, difference))
