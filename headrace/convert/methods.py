from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from headrace.convert.activation_stats import input_column_stats, input_products, update_squares
from headrace.convert.awq import awq
from headrace.convert.gptq import feedback, gptq
from headrace.convert.matrices import (
    ProgressCallback,
    Target,
    expert_matrices,
    quantised_matrix,
    round_matrix,
)
from headrace.convert.smoothquant import smoothquant
from headrace.errors import RequestError
from headrace.model.spec import ModelSpec
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor
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
) -> Matrices:
    """Yield the quantised matrices; GPTQ rounds experts to the nearest."""
    on_progress(0.0)
    by_gptq: list[str] = []
    if method == "gptq" and isinstance(target, QuantSpec):
        experts = expert_matrices(spec, model.tensors)
        by_gptq = [name for name in names if name not in experts]
        part = len(by_gptq) / len(names)
        yield from _by_gptq(
            spec,
            model.tensors,
            by_gptq,
            target,
            pieces,
            threads,
            lambda share: on_progress(part * share),
        )
    done, gptq_names = len(by_gptq), set(by_gptq)
    for name in names:
        if name not in gptq_names:
            yield name, round_matrix(model.tensors[name], target, model.importance.get(name))
            model.tensors[name].release()
            done += 1
            on_progress(done / len(names))


def _by_gptq(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    target: QuantSpec,
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
) -> Matrices:
    # Reading and rounding take turns, so each counts as a half.
    share_read, done = 0.0, 0

    def on_read(share: float) -> None:
        nonlocal share_read
        share_read = share
        on_progress((share_read + done / len(names)) / 2)

    for products, readers in input_products(spec, tensors, names, pieces, threads, on_read):
        correction = feedback(products)
        del products
        for name in readers:
            tensor = tensors[name]
            rows = gptq(tensor.dequantise(), correction, target)
            yield name, quantised_matrix(tensor, target, [rows])
            tensor.release()
            done += 1
            on_read(share_read)
