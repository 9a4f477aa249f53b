"""Writes 2:4 sparse matrices in the layouts of compressed-tensors.

Numbers and int8 codes have the layout `sparse-24-bitmask`: a matrix `X.weight` becomes
`X.compressed` [rows, cols / 2] of the kept values, `X.bitmask` [rows, cols / 8] with a bit for each
column, lowest first, and `X.shape` [2, 1]. Codes of 4 bits stay packed with their zeros, because
the library reads no shorter layout of them; the configuration says that they are sparse.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.folder.compressed_tensors import CompressedTensors
from headrace.convert.folder.matrix_writer import Parts
from headrace.convert.tensor_writer import PlannedTensor
from headrace.errors import RequestError
from headrace.quant.formats import FORMATS
from headrace.quant.sparse import kept, largest_two, places_of
from headrace.quant.spec import NUMBERS, PLAIN, QuantSpec, floats
from headrace.record import frozen

Values = QuantSpec | str
"""A format of codes, or a name in `PLAIN`."""


def sparse_writer(values: Values, prune: str) -> "SparseNumbers | SparseCodes | SparsePacked":
    """Choose the layout; `prune` is named in the configuration.

    Raises RequestError for a format that is not bf16, int4 or int8, or has zero points.
    """
    if isinstance(values, str):
        return SparseNumbers(values, prune)
    if values.codebook != "integer" or values.zero != "none" or values.bits not in (4, 8):
        raise RequestError(
            f"--sparsity 2:4 has no format with {values.name}; use bf16, int8 or int4, in groups "
            "or -row, without -asym"
        )
    if values.has_wide_outliers:
        raise RequestError("--sparsity 2:4 does not fit --to llm-int8; use int8-row or w8a8")
    return (SparsePacked if values.bits == 4 else SparseCodes)(values, prune)


@frozen
class SparseNumbers:
    """Writes plain numbers."""

    dtype: str
    prune: str
    packs_embeddings = False

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        assert not others
        return {
            "quant_method": "compressed-tensors",
            "sparsity_config": _sparsity("sparse-24-bitmask", self.prune, plain_modules, others),
        }

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        return _planned(name, self.dtype, FORMATS[self.dtype].nbytes, rows, cols)

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        number = PLAIN[self.dtype]
        codes = parts["codes"]
        numbers = codes.reshape(len(codes), -1).view(NUMBERS[number])
        return _packed(name, numbers, np.abs(floats(numbers, number)))


@frozen
class SparseCodes:
    """Writes int8 codes, by row or group, with or without int8 activations."""

    spec: QuantSpec
    prune: str
    packs_embeddings = True

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        dense = CompressedTensors(self.spec, packs=False).config(plain_modules, others)
        return dense | {
            "sparsity_config": _sparsity("sparse-24-bitmask", self.prune, plain_modules, others)
        }

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        _, scales = CompressedTensors(self.spec, packs=False).planned(name, rows, cols)
        return [*_planned(name, "I8", 1, rows, cols), scales]

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        dense = CompressedTensors(self.spec, packs=False).packed(name, parts)
        codes, scales = dense[name], dense[f"{name}_scale"]
        codes = codes.reshape(len(codes), -1)
        magnitudes = np.abs(codes.astype(np.float32))
        return {**_packed(name, codes, magnitudes), f"{name}_scale": scales}


@frozen
class SparsePacked:
    """Writes packed codes with their zeros."""

    spec: QuantSpec
    prune: str
    packs_embeddings = True

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        dense = CompressedTensors(self.spec).config(plain_modules, others)
        return dense | {"sparsity_config": _sparsity("dense", self.prune, plain_modules, others)}

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        return CompressedTensors(self.spec).planned(name, rows, cols)

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        return CompressedTensors(self.spec).packed(name, parts)


def _sparsity(
    layout: str, prune: str, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
) -> dict[str, Any]:
    dense_modules = [name for name in others if name != "Embedding"]
    return {
        "format": layout,
        "sparsity_structure": "2:4",
        "prune": prune,
        "global_sparsity": 0.5,
        "targets": ["Linear"],
        "ignore": [*plain_modules, *dense_modules],
    }


def _planned(name: str, dtype: str, width: int, rows: int, cols: int) -> list[PlannedTensor]:
    layer, bytes_of_bits = name.removesuffix("weight"), -(-cols // 8)
    return [
        PlannedTensor(f"{layer}shape", "I64", (2, 1), 16),
        PlannedTensor(f"{layer}compressed", dtype, (rows, cols // 2), rows * cols // 2 * width),
        PlannedTensor(f"{layer}bitmask", "U8", (rows, bytes_of_bits), rows * bytes_of_bits),
    ]


def _packed(name: str, values: NDArray[Any], magnitudes: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """If fewer than two of four are not 0, zeros are kept."""
    is_kept = largest_two(magnitudes)
    layer = name.removesuffix("weight")
    return {
        f"{layer}shape": np.array(values.shape, np.int64).reshape(2, 1),
        f"{layer}compressed": kept(values, is_kept),
        f"{layer}bitmask": places_of(is_kept),
    }
