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
from headrace.convert.folder.matrix_writer import MatrixWriter, Parts
from headrace.convert.tensor_writer import PlannedTensor
from headrace.errors import RequestError
from headrace.quant.arrays import Floats
from headrace.quant.formats import FORMATS
from headrace.quant.sparse import kept, largest_two, places_of
from headrace.quant.spec import NUMBERS, PLAIN, QuantSpec, floats
from headrace.record import frozen

Values = QuantSpec | str
"""A format of codes, or a name in `PLAIN`."""


def sparse_writer(values: Values, prune: str) -> "SparseMatrices":
    """Choose the layout; `prune` is named in the configuration.

    Raises RequestError for a format that is not bf16, int4 or int8, or has zero points.
    """
    if isinstance(values, str):
        return SparseMatrices(_Numbers(values), prune, "sparse-24-bitmask", packs_embeddings=False)
    if values.codebook != "integer" or values.zero != "none" or values.bits not in (4, 8):
        raise RequestError(
            f"--sparsity 2:4 has no format with {values.name}; use bf16, int8 or int4, in groups "
            "or -row, without -asym"
        )
    if values.has_wide_outliers:
        raise RequestError("--sparsity 2:4 does not fit --to llm-int8; use int8-row or w8a8")
    is_packed = values.bits == 4
    layout = "dense" if is_packed else "sparse-24-bitmask"
    dense = CompressedTensors(values, packs=is_packed)
    return SparseMatrices(dense, prune, layout, packs_embeddings=True)


@frozen
class SparseMatrices:
    """Writes the tensors of a dense writer, and those with a value for each weight in short."""

    dense: MatrixWriter
    prune: str
    layout: str
    """Its name in the configuration."""
    packs_embeddings: bool

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        dense_modules = [name for name in others if name != "Embedding"]
        sparsity = {
            "format": self.layout,
            "sparsity_structure": "2:4",
            "prune": self.prune,
            "global_sparsity": 0.5,
            "targets": ["Linear"],
            "ignore": [*plain_modules, *dense_modules],
        }
        return {**self.dense.config(plain_modules, others), "sparsity_config": sparsity}

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        result = []
        for tensor in self.dense.planned(name, rows, cols):
            result += _short_tensors(tensor) if tensor.name == name else [tensor]
        return result

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        result = self.dense.packed(name, parts)
        if name in result:
            result |= _short(name, result.pop(name))
        return result


@frozen
class _Numbers:
    """Writes dense plain numbers."""

    dtype: str
    packs_embeddings = False

    def config(
        self, plain_modules: Sequence[str], others: Mapping[str, QuantSpec]
    ) -> dict[str, Any]:
        return {"quant_method": "compressed-tensors"}

    def planned(self, name: str, rows: int, cols: int) -> list[PlannedTensor]:
        nbytes = rows * cols * FORMATS[self.dtype].nbytes
        return [PlannedTensor(name, self.dtype, (rows, cols), nbytes)]

    def packed(self, name: str, parts: Parts) -> dict[str, NDArray[Any]]:
        return {name: parts["codes"].view(NUMBERS[PLAIN[self.dtype]])}


def _short_tensors(tensor: PlannedTensor) -> list[PlannedTensor]:
    rows, cols = tensor.shape
    layer, bytes_of_bits = tensor.name.removesuffix("weight"), -(-cols // 8)
    return [
        PlannedTensor(f"{layer}shape", "I64", (2, 1), 16),
        PlannedTensor(f"{layer}compressed", tensor.format, (rows, cols // 2), tensor.nbytes // 2),
        PlannedTensor(f"{layer}bitmask", "U8", (rows, bytes_of_bits), rows * bytes_of_bits),
    ]


def _short(name: str, values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """If fewer than two of four are not 0, zeros are kept."""
    values = values.reshape(len(values), -1)
    is_kept = largest_two(_magnitudes(values))
    layer = name.removesuffix("weight")
    return {
        f"{layer}shape": np.array(values.shape, np.int64).reshape(2, 1),
        f"{layer}compressed": kept(values, is_kept),
        f"{layer}bitmask": places_of(is_kept),
    }


def _magnitudes(values: NDArray[Any]) -> Floats:
    is_bf16 = values.dtype == NUMBERS["bf16"]
    return np.abs(floats(values, "bf16") if is_bf16 else values.astype(np.float32))
