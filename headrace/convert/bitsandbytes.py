"""Folders that bitsandbytes reads: of nf4 and fp4 whose scales are quantised again (QLoRA, Dettmers
et al. 2023), and of LLM.int8. The formats are told in `checkpoint/quantisation/bitsandbytes.py`.

A scale of nf4 or fp4 becomes one of 256 values between -1 and 1 (`scale_values`), times the largest
of 256 scales, plus the mean of all.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.packing import Parts, check_groups
from headrace.convert.tensor_file import PlannedTensor
from headrace.errors import RequestError
from headrace.quant.spec import CODEBOOKS, QuantSpec
from headrace.record import frozen

_NESTED = 256
"""Scales that share a scale."""
_STATE_BYTES = 256
"""Of the JSON object that goes with a matrix, filled up with spaces."""


@frozen
class BitsAndBytes:
    """A writer of nf4 and fp4, in groups of columns."""

    spec: QuantSpec

    def __post_init__(self) -> None:
        if self.spec.codebook not in ("nf4", "fp4") or not self.spec.group:
            raise RequestError(
                f"bitsandbytes has no format for {self.spec.name}; it has nf4 and fp4 in "
                "groups of columns"
            )

    def config(self, left: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.spec.codebook,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(left) or None,
        }

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        check_groups(self.spec, name, cols)
        blocks = rows * cols // self.spec.group
        nested = -(-blocks // _NESTED)
        return [
            PlannedTensor(name, "U8", (rows * cols // 2, 1), rows * cols // 2),
            PlannedTensor(f"{name}.absmax", "U8", (blocks,), blocks),
            PlannedTensor(f"{name}.quant_map", "F32", (16,), 64),
            PlannedTensor(f"{name}.nested_absmax", "F32", (nested,), 4 * nested),
            PlannedTensor(f"{name}.nested_quant_map", "F32", (256,), 1024),
            PlannedTensor(self._state(name), "U8", (_STATE_BYTES,), _STATE_BYTES),
        ]

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        codes: NDArray[np.uint8] = parts["codes"]
        scales = parts["scales"].astype(np.float32).reshape(-1)
        offset = float(scales.mean(dtype=np.float64).astype(np.float32))
        left = np.pad(scales - np.float32(offset), (0, -len(scales) % _NESTED)).reshape(-1, _NESTED)
        largest = np.abs(left).max(axis=1)
        values = scale_values()
        inverse = np.divide(np.float32(1), largest, out=np.zeros_like(largest), where=largest > 0)
        nearest = np.searchsorted((values[1:] + values[:-1]) / 2, left * inverse[:, None]).astype(
            np.uint8
        )
        state = {
            "quant_type": self.spec.codebook,
            "blocksize": self.spec.group,
            "dtype": "float32",
            "shape": list(codes.shape),
            "nested_blocksize": _NESTED,
            "nested_dtype": "float32",
            "nested_offset": offset,
        }
        flat = codes.reshape(-1, 2)
        return {
            name: (flat[:, 0] << np.uint8(4)) | flat[:, 1],
            f"{name}.absmax": nearest.reshape(-1)[: len(scales)],
            f"{name}.quant_map": np.array(CODEBOOKS[self.spec.codebook], np.float32),
            f"{name}.nested_absmax": largest,
            f"{name}.nested_quant_map": values,
            self._state(name): np.frombuffer(
                json.dumps(state).ljust(_STATE_BYTES).encode(), np.uint8
            ),
        }

    def _state(self, name: str) -> str:
        return f"{name}.quant_state.bitsandbytes__{self.spec.codebook}"


class LlmInt8:
    """A writer of int8 by row, whose activations are int8 but for outliers (LLM.int8, Dettmers et
    al. 2022).
    """

    def config(self, left: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": list(left) or None,
        }

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        return [
            PlannedTensor(name, "I8", (rows, cols), rows * cols),
            PlannedTensor(self._scales(name), "F32", (rows,), 4 * rows),
            PlannedTensor(f"{name}_format", "U8", (), 1),
        ]

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        largest = parts["row_scales"] * np.float32(127)
        return {
            name: parts["codes"],
            self._scales(name): largest,
            f"{name}_format": np.zeros((), np.uint8),
        }

    def _scales(self, name: str) -> str:
        return f"{name.removesuffix('weight')}SCB"


@cache
def scale_values() -> NDArray[np.float32]:
    """The 256 values of a quantised scale, in order: 0, 1, and in each of seven decades of either
    sign the centres of 1 to 64 equal parts of its upper nine tenths ("dynamic tree quantisation",
    Dettmers 2016).
    """
    positive = []
    for decade in range(7):
        borders = np.linspace(0.1, 1, 2**decade + 1)
        positive.append(10.0 ** (decade - 6) * (borders[1:] + borders[:-1]) / 2)
    some = np.concatenate(positive)
    return np.sort(np.concatenate([-some, [0.0], some, [1.0]])).astype(np.float32)
