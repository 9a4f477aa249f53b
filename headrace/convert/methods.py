"""The methods by which matrices are quantised: what a text shows before, and then one matrix after
the other.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.convert.awq import awq
from headrace.convert.calibrate import input_columns, input_products, squares
from headrace.convert.gptq import gptq
from headrace.convert.matrices import Target, Tell, expert_matrices, quantised, round_matrix
from headrace.convert.smoothquant import smoothquant
from headrace.errors import RequestError
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.quant.spec import QuantSpec

Matrices = Iterator[tuple[str, StoredTensor]]


class Prepared(NamedTuple):
    """A model before its matrices are rounded."""

    tensors: Mapping[str, StoredTensor]
    """All of them; what is scaled is so when it is read, or float32 where it is not to be
    quantised.
    """
    importance: Mapping[str, NDArray[np.float32]]
    """What errors of the columns of a matrix count where its ranges are clipped [cols]; all the
    same where it has none.
    """


def prepared(
    method: str,
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    to: Target,
    pieces: list[list[int]],
    threads: int,
    tell: Tell,
) -> Prepared:
    """The model as a method rounds it, with pieces of a text to calibrate with; `tell` hears how
    much is done, from 0 to 1.

    Raises RequestError for a method that does not go with blocks of GGUF files.
    """
    if method == "imatrix":
        found = input_columns(squares, spec, tensors, pieces, names, threads, tell)
        return Prepared(tensors, {name: total for total, readers in found for name in readers})
    if not isinstance(to, QuantSpec):
        if method != "rtn":
            raise RequestError(
                f"--method {method} does not go with {to}: blocks of GGUF files are "
                "rounded by rtn or imatrix"
            )
        return Prepared(tensors, {})
    if method == "awq":
        scalings, importance = awq(spec, tensors, names, to, pieces, threads, tell)
        return Prepared(scalings.applied(tensors, names), importance)
    if method == "smoothquant":
        return Prepared(
            smoothquant(spec, tensors, names, pieces, threads, tell).applied(tensors, names), {}
        )
    return Prepared(tensors, {})


def quantised_matrices(
    method: str,
    spec: ModelSpec,
    model: Prepared,
    names: list[str],
    to: Target,
    pieces: list[list[int]],
    threads: int,
) -> Matrices:
    """The named matrices, one after the other, in an order of the method's own; those of experts
    are never quantised by GPTQ.
    """
    left = names
    if method == "gptq" and isinstance(to, QuantSpec):
        experts = expert_matrices(spec, model.tensors)
        ours, left = (
            [name for name in names if name not in experts],
            [name for name in names if name in experts],
        )
        for products, readers in input_products(
            spec, model.tensors, pieces, ours, threads, lambda done: None
        ):
            for name in readers:
                tensor = model.tensors[name]
                yield name, quantised(tensor, to, [gptq(tensor.dequantise(), products, to)])
                tensor.release()
    for name in left:
        yield name, round_matrix(model.tensors[name], to, model.importance.get(name))
        model.tensors[name].release()
