"""SmoothQuant (Xiao et al. 2022): move outliers of activations into the weights.

Column j of an input is divided by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha).
"""

from collections.abc import Mapping

import numpy as np

from headrace.convert.activation_stats import input_column_stats, update_maxima
from headrace.convert.matrices import ProgressCallback, row_chunks
from headrace.convert.scaling import ScalingGroup, Scalings, scaling_groups
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor

ALPHA = 0.5
"""Migration strength, from 0 to 1."""


def smoothquant(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
    alpha: float = ALPHA,
) -> Scalings:
    groups = scaling_groups(trace_model(spec, tensors), names)
    group_of = {name: group for group in groups for name in group.readers}
    scalings = Scalings()

    maxima = input_column_stats(update_maxima, spec, tensors, names, pieces, threads, on_progress)
    for activations, readers in maxima:
        if group := group_of.get(readers[0]):
            chunks = (chunk for name in readers for chunk in row_chunks(tensors[name]))
            weights = np.max([np.abs(chunk).max(axis=0) for chunk in chunks], axis=0)
            scalings.add(group, _factors(group, activations, weights, alpha))
    return scalings


def _factors(group: ScalingGroup, activations: Floats, weights: Floats, alpha: float) -> Floats:
    x, w = (np.zeros(group.columns.max() + 1, np.float32) for _ in range(2))
    np.maximum.at(x, group.columns, activations)
    np.maximum.at(w, group.columns, weights)
    factors = np.ones_like(x)
    np.divide(x**alpha, w ** (1 - alpha), out=factors, where=(x > 0) & (w > 0))
    return factors
