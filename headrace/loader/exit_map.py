"""The linear map of an early exit, from its rows to rows like those after the last layer.

A linear map makes the rows of a middle layer much better for the head (Din et al. 2023, "Jump to
Conclusions").
"""

import base64
from collections.abc import Mapping
from contextlib import suppress
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


def decoded_parts(facts: object) -> dict[str, bytes]:
    """Decode the parts of a `map` in a file; parts that are no base64 are left out."""
    parts = {}
    for part, text in facts.items() if isinstance(facts, Mapping) else ():
        with suppress(TypeError, ValueError):
            parts[part] = base64.b64decode(text, validate=True)
    return parts


def parse_exit_map(where: str, parts: Mapping[str, bytes], dim: int, remedy: str) -> ExitMap:
    """Make the map of rows of `dim` numbers from `decoded_parts`. Raises FormatError."""
    for part, nbytes in (("weight", _BF16_BYTES * dim * dim), ("bias", _F32_BYTES * dim)):
        if len(parts.get(part, b"")) != nbytes:
            raise FormatError(
                f"{where} has a map whose {part} is not {nbytes:,} bytes in base64; {remedy}"
            )
    weight = np.frombuffer(parts["weight"], "<u2").astype(np.uint16, copy=False).reshape(dim, dim)
    bias = np.frombuffer(parts["bias"], "<f4").astype(np.float32, copy=False)
    if not np.isfinite(bias).all() or ((weight & 0x7F80) == 0x7F80).any():
        raise FormatError(f"{where} has a map with numbers that are not finite; {remedy}")
    return ExitMap(weight, bias)
