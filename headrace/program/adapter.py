"""Low-rank adapters: what is added to the products of a model with its weights (LoRA, Hu et al.
2021).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.program.trace import Program


class LowRank(NamedTuple):
    """To x @ weight.T of a weight [rows, cols] it adds scale * x @ down.T @ up.T."""

    down: NDArray[np.float32]  # [rank, cols]
    up: NDArray[np.float32]  # [rows, rank]
    scale: float


Adapter = Mapping[str, LowRank]
"""The matrices of an adapter, by the names of the weights that they go with."""


def adapted(program: Program, adapter: Adapter) -> Program:
    """The same program with the bytes of the adapter, in bf16, beside those of the weights: what a
    step reads where all rows have it.
    """
    weights = {name: program.weights[name] for name in adapter}
    more = {
        name: replace(weight, nbytes=weight.nbytes + _nbytes(adapter[name]))
        for name, weight in weights.items()
    }
    return program.with_weights(program.weights | more)


def _nbytes(matrices: LowRank) -> int:
    return 2 * (matrices.down.size + matrices.up.size)
