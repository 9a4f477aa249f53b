"""The linear map of an early exit, from its rows to rows like those after the last layer.

A linear map makes the rows of a middle layer much better for the head (Din et al. 2023, "Jump to
Conclusions").
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.spec import encode_numbers
from headrace.record import frozen

_BF16_BYTES, _F32_BYTES = 2, 4


@frozen(eq=False)
class ExitMap:
    weight: NDArray[np.uint16]  # [dim, dim] bf16
    bias: NDArray[np.float32]  # [dim]

    @classmethod
    def of(cls, weight: NDArray[np.float32], bias: NDArray[np.float32]) -> "ExitMap":
        rounded: Any = encode_numbers(np.ascontiguousarray(weight, np.float32), "bf16")
        return cls(rounded, np.ascontiguousarray(bias, np.float32))

    def tensors(self, name: str) -> dict[str, StoredTensor]:
        """Return the map as tensors of a model: `name`, and `name` with `_bias`."""
        words = np.ascontiguousarray(self.weight).reshape(-1).view(np.uint8)
        weight = StoredTensor.from_bytes(name, FORMATS["BF16"], self.weight.shape, words)
        return {name: weight, f"{name}_bias": StoredTensor.from_floats(f"{name}_bias", self.bias)}

    def facts(self) -> dict[str, str]:
        """Return the map as base64 in JSON."""
        parts = {"weight": self.weight.astype("<u2"), "bias": self.bias.astype("<f4")}
        return {key: base64.b64encode(part.tobytes()).decode() for key, part in parts.items()}


def parse_exit_map(where: str, facts: object, dim: int, remedy: str) -> ExitMap:
    """Parse the `map` of a file for rows of `dim` numbers. Raises FormatError."""
    values = facts if isinstance(facts, Mapping) else {}
    parts = []
    for part, nbytes in (("weight", _BF16_BYTES * dim * dim), ("bias", _F32_BYTES * dim)):
        try:
            data = base64.b64decode(values.get(part, ""), validate=True)
        except (TypeError, ValueError):
            data = b""
        if len(data) != nbytes:
            raise FormatError(
                f"{where} has a map whose {part} is not {nbytes:,} bytes in base64; {remedy}"
            )
        parts.append(data)
    weight = np.frombuffer(parts[0], "<u2").astype(np.uint16).reshape(dim, dim)
    bias = np.frombuffer(parts[1], "<f4").astype(np.float32)
    if not np.isfinite(bias).all() or ((weight & 0x7F80) == 0x7F80).any():
        raise FormatError(f"{where} has a map with numbers that are not finite; {remedy}")
    return ExitMap(weight, bias)
