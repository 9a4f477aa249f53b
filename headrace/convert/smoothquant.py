"""SmoothQuant (Xiao et al. 2022): what is hard to quantise in activations goes to the weights in
part.

Activations of 8 bits by row suffer from single columns that are much larger than all others. Column
j is divided by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), and the matrices that read it have
theirs multiplied by that.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.convert.calibrate import input_columns, maxima
from headrace.convert.matrices import Tell, chunks
from headrace.convert.scaling import ScalingGroup, Scalings, scaling_groups
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor

Floats = NDArray[np.float32]

ALPHA = 0.5
"""How much of the difficulty goes to the weights: 0 none, 1 all."""


def smoothquant(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    pieces: list[list[int]],
    threads: int,
    tell: Tell,
    alpha: float = ALPHA,
) -> Scalings:
    """The scalings for the inputs of the named matrices."""
    groups = scaling_groups(trace_model(spec, tensors), names)
    group_of = {name: group for group in groups for name in group.readers}
    scalings = Scalings()
    for activations, readers in input_columns(maxima, spec, tensors, pieces, names, threads, tell):
        if group := group_of.get(readers[0]):
            weights = np.max(
                [np.abs(chunk).max(axis=0) for name in readers for chunk in chunks(tensors[name])],
                axis=0,
            )
            scalings.add(group, _factors(group, activations, weights, alpha))
    return scalings


def _factors(group: ScalingGroup, activations: Floats, weights: Floats, alpha: float) -> Floats:
    """Those of the largest magnitudes in each column; 1 where either has none."""
    x, w = (np.zeros(group.columns.max() + 1, np.float32) for _ in range(2))
    np.maximum.at(x, group.columns, activations)
    np.maximum.at(w, group.columns, weights)
    factors = np.ones_like(x)
    np.divide(x**alpha, w ** (1 - alpha), out=factors, where=(x > 0) & (w > 0))
    return factors
