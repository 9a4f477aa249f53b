from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple, get_args

from headrace.convert.activation_stats import input_column_stats, input_products, update_squares
from headrace.convert.awq import awq
from headrace.convert.gptq import Feedback, feedback, gptq
from headrace.convert.matrices import (
    ProgressCallback,
    Target,
    expert_matrices,
    quantised_matrix,
    round_matrix,
)
from headrace.convert.pruning import Pruning
from headrace.convert.smoothquant import smoothquant
from headrace.convert.sparsegpt import sparsegpt, sparsegpt_rounded
from headrace.errors import RequestError
from headrace.model.spec import ModelSpec
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor
from headrace.quant.sparse import GROUP
from headrace.quant.spec import QuantSpec

Method = Literal["rtn", "imatrix", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = get_args(Method)
Matrices = Iterator[tuple[str, StoredTensor]]


class PreparedModel(NamedTuple):
    tensors: Mapping[str, StoredTensor]
    """Matrices to quantise are scaled when they are read."""
    importance: Mapping[str, Floats]
    """Weights of squared errors [cols], by matrix."""


def prepare_model(
    method: str,
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    target: Target,
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
) -> PreparedModel:
    """Prepare a method. Raises RequestError if it does not fit the target."""
    if method == "imatrix":
        stats = input_column_stats(
            update_squares, spec, tensors, names, pieces, threads, on_progress
        )
        importance = {name: squares for squares, readers in stats for name in readers}
        return PreparedModel(tensors, importance)
    if not isinstance(target, QuantSpec):
        if method != "rtn":
            raise RequestError(
                f"--method '{method}' cannot round to {target}, a block format of GGUF; "
                "use rtn or imatrix"
            )
        return PreparedModel(tensors, {})
    if method == "awq":
        scalings, importance = awq(spec, tensors, names, target, pieces, threads, on_progress)
        return PreparedModel(scalings.apply_all(tensors, names), importance)
    if method == "smoothquant":
        scalings = smoothquant(spec, tensors, names, pieces, threads, on_progress)
        return PreparedModel(scalings.apply_all(tensors, names), {})
    return PreparedModel(tensors, {})


def quantise_matrices(
    method: str,
    spec: ModelSpec,
    model: PreparedModel,
    names: list[str],
    target: Target,
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
    pruning: Pruning | None = None,
) -> Matrices:
    """Yield the quantised matrices, pruned first.

    GPTQ rounds experts to the nearest. SparseGPT prunes down projections of experts by magnitude.
    """
    on_progress(0.0)
    compensated: list[str] = []
    if pruning and pruning.method == "sparsegpt":
        compensated = names
    elif method == "gptq" and isinstance(target, QuantSpec):
        experts = expert_matrices(spec, model.tensors)
        compensated = [name for name in names if name not in experts]
    finish = partial(_compensated, method == "gptq", model, target, pruning)

    finished: set[str] = set()
    if compensated:
        part = len(compensated) / len(names)
        for name, matrix in _by_products(
            spec,
            model.tensors,
            compensated,
            finish,
            GROUP if pruning else 1,
            pieces,
            threads,
            lambda share: on_progress(part * share),
        ):
            finished.add(name)
            yield name, matrix
    for name in names:
        if name not in finished:
            tensor = model.tensors[name]
            pruned = pruning.pruned(tensor) if pruning else tensor
            yield name, round_matrix(pruned, target, model.importance.get(name))
            tensor.release()
            finished.add(name)
            on_progress(len(finished) / len(names))


def _compensated(
    rounds_too: bool,
    model: PreparedModel,
    target: Target,
    pruning: Pruning | None,
    tensor: StoredTensor,
    correction: Feedback,
) -> StoredTensor:
    """Prune and round a matrix, whose other columns compensate."""
    weights = tensor.dequantise()
    mask = pruning.mask(tensor.name, weights) if pruning else None
    if rounds_too and isinstance(target, QuantSpec):
        rows = (
            sparsegpt_rounded(weights, correction, target, mask)
            if pruning
            else gptq(weights, correction, target)
        )
        return quantised_matrix(tensor, target, [rows])
    pruned = StoredTensor.from_floats(tensor.name, sparsegpt(weights, correction, mask))
    return round_matrix(pruned, target, model.importance.get(tensor.name))


def _by_products(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    finish: Callable[[StoredTensor, Feedback], StoredTensor],
    together: int,
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
) -> Matrices:
    """Yield the matrices whose inputs have products."""
    # Reading and rounding take turns, so each counts as a half.
    share_read, done = 0.0, 0

    def on_read(share: float) -> None:
        nonlocal share_read
        share_read = share
        on_progress((share_read + done / len(names)) / 2)

    for products, readers in input_products(spec, tensors, names, pieces, threads, on_read):
        correction = feedback(products, together=together)
        del products
        for name in readers:
            tensor = tensors[name]
            yield name, finish(tensor, correction)
            tensor.release()
            done += 1
            on_read(share_read)
