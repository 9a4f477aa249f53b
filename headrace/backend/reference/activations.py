"""The functions of `Activation` in NumPy."""

import math

import numpy as np
from numpy.typing import NDArray

from headrace.program.ops import Activation

Floats = NDArray[np.float64]

erfc = np.frompyfunc(math.erfc, 1, 1)


def activated(x: Floats, activation: Activation) -> Floats:
    """Raises AssertionError for `clamped_swiglu`."""
    y: Floats
    match activation:
        case "silu":
            y = x / (1 + np.exp(-x))
        case "gelu":
            y = x * (0.5 * erfc(x * -(0.5**0.5)).astype(np.float64))
        case "gelu_tanh":
            # 1 + tanh(u) is 2 / (1 + exp(-2u)).
            y = x / (
                1 + np.exp(x * (-2 * (2 / np.pi) ** 0.5 + x * x * (-0.08943 * (2 / np.pi) ** 0.5)))
            )
        case "relu":
            y = np.maximum(x, 0)
        case "clamped_swiglu":
            raise AssertionError("clamped_swiglu needs a gate and an up")
    return y


def gated(gate: Floats, up: Floats, activation: Activation) -> Floats:
    if activation != "clamped_swiglu":
        return activated(gate, activation) * up
    gate, up = np.minimum(gate, 7), np.maximum(np.minimum(up, 7), -7)
    y: Floats = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return y
