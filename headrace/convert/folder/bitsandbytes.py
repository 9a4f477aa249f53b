"""Writes nf4, fp4 (QLoRA, Dettmers et al. 2023) and LLM.int8.

A quantised scale is one of 256 values times the maximum of 256 scales, plus the mean.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.folder.matrix_writer import Parts, check_groups
from headrace.convert.tensor_writer import PlannedTensor
from headrace.errors import RequestError
from headrace.quant.arrays import Bytes, Floats
from headrace.quant.spec import CODEBOOKS, QuantSpec
from headrace.record import frozen

_NESTED = 256
"""Scales that share a scale."""
_STATE_BYTES = 256


@frozen
class BitsAndBytes:
    spec: QuantSpec
    packs_embeddings = False

    def __post_init__(self) -> None:
        if self.spec.codebook not in ("nf4", "fp4") or not self.spec.group:
            raise RequestError(
                f"bitsandbytes has no format for {self.spec.name}; "
                "use nf4 or fp4 with groups of columns"
            )

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        assert not others, "bitsandbytes has no quantised embeddings"
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.spec.codebook,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(plain_modules) or None,
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
        codes: Bytes = parts["codes"]
        scales = parts["scales"].astype(np.float32).reshape(-1)

        # Quantise the scales, less their mean, in blocks that share a scale.
        offset = float(scales.mean(dtype=np.float64).astype(np.float32))
        padded = np.pad(scales - np.float32(offset), (0, -len(scales) % _NESTED))
        centred = padded.reshape(-1, _NESTED)
        maxima = np.abs(centred).max(axis=1)
        inverse = np.divide(np.float32(1), maxima, out=np.zeros_like(maxima), where=maxima > 0)
        values = scale_values()
        borders = (values[1:] + values[:-1]) / 2
        nearest = np.searchsorted(borders, centred * inverse[:, None]).astype(np.uint8)

        state = {
            "quant_type": self.spec.codebook,
            "blocksize": self.spec.group,
            "dtype": "float32",
            "shape": list(codes.shape),
            "nested_blocksize": _NESTED,
            "nested_dtype": "float32",
            "nested_offset": offset,
        }
        pairs = codes.reshape(-1, 2)
        return {
            name: (pairs[:, 0] << np.uint8(4)) | pairs[:, 1],
            f"{name}.absmax": nearest.reshape(-1)[: len(scales)],
            f"{name}.quant_map": np.array(CODEBOOKS[self.spec.codebook], np.float32),
            f"{name}.nested_absmax": maxima,
            f"{name}.nested_quant_map": values,
            self._state(name): np.frombuffer(
                json.dumps(state).ljust(_STATE_BYTES).encode(), np.uint8
            ),
        }

    def _state(self, name: str) -> str:
        return f"{name}.quant_state.bitsandbytes__{self.spec.codebook}"


class LlmInt8:
    """Writes int8 by row (LLM.int8, Dettmers et al. 2022)."""

    packs_embeddings = False

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        assert not others, "bitsandbytes has no quantised embeddings"
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": list(plain_modules) or None,
        }

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        return [
            PlannedTensor(name, "I8", (rows, cols), rows * cols),
            PlannedTensor(self._scales(name), "F32", (rows,), 4 * rows),
            PlannedTensor(f"{name}_format", "U8", (), 1),
        ]

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        maxima = parts["row_scales"] * np.float32(127)
        return {
            name: parts["codes"],
            self._scales(name): maxima,
            f"{name}_format": np.zeros((), np.uint8),
        }

    def _scales(self, name: str) -> str:
        return f"{name.removesuffix('weight')}SCB"


@cache
def scale_values() -> Floats:
    """The 256 values of "dynamic tree quantisation" (Dettmers 2016): 0, 1, and seven decades."""
    positive = []
    for decade in range(7):
        borders = np.linspace(0.1, 1, 2**decade + 1)
        positive.append(10.0 ** (decade - 6) * (borders[1:] + borders[:-1]) / 2)
    centres = np.concatenate(positive)
    return np.sort(np.concatenate([-centres, [0.0], centres, [1.0]])).astype(np.float32)
