"""Low-rank adapters (LoRA, Hu et al. 2021)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.program.trace import Program

_BF16_BYTES = 2


class LowRank(NamedTuple):
    """Adds scale * x @ down.T @ up.T to the product x @ weight.T of a weight [rows, cols]."""

    down: NDArray[np.float32]  # [rank, cols]
    up: NDArray[np.float32]  # [rows, rank]
    scale: float


Adapter = Mapping[str, LowRank]
"""Low-rank matrices by the name of the adapted weight."""


def adapted(program: Program, adapter: Adapter) -> Program:
    """The program whose rows all use the adapter, with its bytes in bf16."""
    adapted_weights = {
        name: replace(
            program.weights[name], nbytes=program.weights[name].nbytes + _num_bytes(matrices)
        )
        for name, matrices in adapter.items()
    }
    return program.with_weights(program.weights | adapted_weights)


def _num_bytes(matrices: LowRank) -> int:
    return _BF16_BYTES * (matrices.down.size + matrices.up.size)
