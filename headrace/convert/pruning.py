"""2:4 sparsity: of 4 neighbouring weights of a row, the 2 with the highest scores are kept.

* Magnitude: the score of a weight is |w|.
* Wanda (Sun et al. 2023): |w| |x|, with the norm |x| of the weight's column in the input.
* SparseGPT (Frantar and Alistarh 2023) is in `sparsegpt.py`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.convert.activation_stats import input_column_stats, update_squares
from headrace.convert.matrices import ProgressCallback, Target
from headrace.errors import RequestError
from headrace.model.spec import ModelSpec
from headrace.quant import dequantise as dq
from headrace.quant.arrays import Floats
from headrace.quant.formats import Format, StoredTensor, TensorPart
from headrace.quant.sparse import GROUP, KEPT, largest_two

PruneMethod = Literal["magnitude", "wanda", "sparsegpt"]
PRUNE_METHODS: tuple[PruneMethod, ...] = get_args(PruneMethod)
SPARSITY = "2:4"

Mask = NDArray[np.bool_]


class Pruning(NamedTuple):
    method: PruneMethod
    norms: Mapping[str, Floats]
    """Norms of the columns of the input [cols] by matrix, for Wanda. Others are pruned by
    magnitude.
    """

    def pruned(self, tensor: StoredTensor) -> StoredTensor:
        """Set weights to 0 when they are read."""
        parts = {**tensor.parts, "column_norms": self._norms(tensor.name, tensor.cols)}
        return StoredTensor(
            name=tensor.name,
            format=_pruned(tensor.format),
            shape=tensor.shape,
            parts=parts,
            row_order=tensor.row_order,
        )

    def mask(self, name: str, weights: Floats) -> Mask | None:
        """The kept weights [rows, cols] of a matrix; None if SparseGPT chooses them."""
        if self.method == "sparsegpt":
            return None
        return largest_two(column_scores(weights, self._norms(name, weights.shape[1])))

    def _norms(self, name: str, cols: int) -> Floats:
        norms = self.norms.get(name)
        return np.ones(cols, np.float32) if norms is None else norms


def check_pruning(sparsity: str | None, prune: str | None, *, is_gguf: bool) -> None:
    """Raise RequestError for options that do not fit."""
    if sparsity is None:
        if prune is not None:
            raise RequestError(
                f"--prune {prune} needs --sparsity {SPARSITY}, which says how many weights it keeps"
            )
        return
    if sparsity != SPARSITY:
        raise RequestError(
            f"--sparsity {sparsity[:40]!r} is not supported: kernels read {SPARSITY}, "
            f"{KEPT} kept weights of {GROUP} neighbours of a row; use --sparsity {SPARSITY}"
        )
    if is_gguf:
        raise RequestError(
            f"--sparsity {sparsity}: GGUF has no type for sparse weights; name a folder as OUT"
        )


def check_method(method: str, target: Target) -> None:
    """Raise RequestError for a quantisation method that cannot round pruned weights to `target`."""
    if isinstance(target, str) and method != "rtn":
        raise RequestError(
            f"--method {method} rounds to integers, and --to {target.lower()} has none; "
            "leave it out"
        )
    if method not in ("rtn", "imatrix", "gptq"):
        raise RequestError(
            f"--method {method} does not know pruned weights; use gptq, rtn or imatrix with "
            f"--sparsity {SPARSITY}"
        )


def check_columns(tensors: Mapping[str, StoredTensor], names: list[str]) -> None:
    """Raise RequestError for a matrix whose columns are not whole groups."""
    for name in names:
        if tensors[name].cols % GROUP:
            raise RequestError(
                f"tensor {name} has {tensors[name].cols:,} columns, not a multiple of the {GROUP} "
                f"of --sparsity {SPARSITY}; leave out --sparsity"
            )


def prepare_pruning(
    method: PruneMethod,
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
) -> Pruning:
    """Read the text for Wanda's norms. Raises as `check_columns` and `input_column_stats`."""
    check_columns(tensors, names)
    if method != "wanda":
        return Pruning(method, {})
    stats = input_column_stats(update_squares, spec, tensors, names, pieces, threads, on_progress)
    return Pruning(
        method, {name: np.sqrt(squares) for squares, readers in stats for name in readers}
    )


def column_scores(weights: Floats, norms: Floats) -> Floats:
    """Scores of Wanda; of magnitude, if all norms are 1."""
    result: Floats = np.abs(weights) * norms
    return result


@cache
def _pruned(base: Format) -> Format:

    def values(parts: dq.Parts, rows: dq.Rows) -> Floats:
        weights = base.values(parts, rows)
        mask = largest_two(column_scores(weights, parts["column_norms"]))
        return np.where(mask, weights, np.float32(0))

    return Format(
        name=f"{base.name}, pruned",
        block=base.block,
        nbytes=base.nbytes,
        values=values,
        parts={**base.parts, "column_norms": TensorPart("f4", by_row=False)},
    )
