"""Pruning to 2:4: the kept weights, what others do for them, and refusals."""

from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest

from headrace.convert.gptq import feedback
from headrace.convert.matrices import quantisable
from headrace.convert.methods import PreparedModel, prepare_model, quantise_matrices
from headrace.convert.pruning import (
    PRUNE_METHODS,
    Pruning,
    check_columns,
    check_method,
    check_pruning,
    column_scores,
    prepare_pruning,
)
from headrace.convert.sparsegpt import sparsegpt, sparsegpt_rounded
from headrace.errors import RequestError
from headrace.quant.format_names import named_format
from headrace.quant.formats import StoredTensor
from headrace.quant.rounding import round_to_nearest
from headrace.quant.sparse import largest_two
from headrace.quant.spec import dequantise_rows
from tests.convert.test_gptq import PIECES, SPEC, TENSORS, correlated
from tests.families import spec_of
from tests.tiny import Tensors, random_tensors, tiny_model

X = correlated(3, 128, 16)
PRODUCTS = X.T @ X / len(X)
WEIGHTS = np.random.default_rng(3).standard_normal((24, 128)).astype(np.float32)


def error(weights: np.ndarray) -> float:
    return float(np.square(X @ (weights - WEIGHTS).T).mean())


def is_24(weights: np.ndarray) -> bool:
    return bool(((weights.reshape(-1, 4) != 0).sum(axis=1) <= 2).all())


def test_prune_methods_by_output_error() -> None:
    norms = np.sqrt(np.diag(PRODUCTS))
    magnitude = WEIGHTS * largest_two(np.abs(WEIGHTS))
    wanda = WEIGHTS * largest_two(column_scores(WEIGHTS, norms))
    compensated = sparsegpt(WEIGHTS, feedback(PRODUCTS, together=4))
    assert is_24(compensated)
    assert error(compensated) < 0.2 * error(wanda) < 0.2 * error(magnitude)


def test_sparsegpt_of_independent_columns_is_wanda() -> None:
    squares = np.random.default_rng(4).uniform(0.5, 2, 128).astype(np.float32)
    kept = largest_two(column_scores(WEIGHTS, np.sqrt(squares + 0.01 * squares.mean())))
    found = sparsegpt(WEIGHTS, feedback(np.diag(squares), together=4))
    np.testing.assert_allclose(found, WEIGHTS * kept, atol=1e-6)


def test_sparsegpt_takes_the_best_of_all_masks() -> None:
    """Of four columns, the best mask with its best changes, by least squares over all six."""
    products = PRODUCTS[:4, :4] + np.eye(4, dtype=np.float32)
    correction = feedback(products, damping=0.0, together=4)
    for row, found in zip(WEIGHTS[:, :4], sparsegpt(WEIGHTS[:, :4], correction), strict=True):
        best = None
        for kept in map(list, combinations(range(4), 2)):
            changed = np.zeros(4)
            changed[kept] = np.linalg.solve(products[np.ix_(kept, kept)], products[kept] @ row)
            cost = (changed - row) @ products @ (changed - row)
            if best is None or cost < best[0]:
                best = cost, changed
        assert best is not None
        np.testing.assert_allclose(found, best[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["int8-row", "int4-g32", "int4-row"])
def test_rounding_in_the_same_pass(name: str) -> None:
    spec, correction = named_format(name), feedback(PRODUCTS, together=4)
    pruned = sparsegpt(WEIGHTS, correction)
    together = dequantise_rows(spec, sparsegpt_rounded(WEIGHTS, correction, spec))
    apart = dequantise_rows(spec, round_to_nearest(pruned, spec))
    assert is_24(together) and error(together) < error(apart)
    mask = largest_two(np.abs(WEIGHTS))
    by_magnitude = dequantise_rows(spec, sparsegpt_rounded(WEIGHTS, correction, spec, mask))
    assert not by_magnitude[~mask].any() and error(by_magnitude) < error(WEIGHTS * mask)


def test_columns_without_inputs_are_pruned_first() -> None:
    products = PRODUCTS.copy()
    products[[1, 2]] = products[:, [1, 2]] = 0
    found = sparsegpt(100 * WEIGHTS, feedback(products, together=4))
    assert not found[:, [1, 2]].any() and found[:, [0, 3]].all()


def pruned(
    prune: str, method: str, to: str, spec: object = SPEC, tensors: Tensors = TENSORS
) -> Tensors:
    names = quantisable(spec, tensors)  # type: ignore[arg-type]
    target = to if to == "BF16" else named_format(to)
    quiet: Callable[[float], None] = lambda done: None  # noqa: E731
    pruning = prepare_pruning(prune, spec, tensors, names, PIECES, 1, quiet)  # type: ignore[arg-type]
    model = prepare_model(method, spec, tensors, names, target, PIECES, 1, quiet)  # type: ignore[arg-type]
    assert isinstance(model, PreparedModel)
    return dict(
        quantise_matrices(method, spec, model, names, target, PIECES, 1, quiet, pruning)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("prune", "options"),
    [
        *product(
            PRUNE_METHODS,
            [("rtn", "BF16"), ("rtn", "int8-row"), ("imatrix", "int4-g32"), ("gptq", "int4-g32")],
        )
    ],
)
def test_pruned_models(prune: str, options: tuple[str, str]) -> None:
    found = pruned(prune, *options)
    assert sorted(found) == sorted(quantisable(SPEC, TENSORS))
    for name, tensor in found.items():
        weights = tensor.dequantise()
        assert tensor.shape == TENSORS[name].shape and is_24(weights) and weights.any(), name


@pytest.mark.parametrize("prune", PRUNE_METHODS)
def test_experts_are_pruned_and_routers_are_not(prune: str) -> None:
    spec = spec_of("mixtral")
    tensors = random_tensors(spec, 3)
    found = pruned(prune, "rtn", "BF16", spec, tensors)
    assert any("experts" in name for name in found) and not any("router" in name for name in found)
    assert all(is_24(tensor.dequantise()) for tensor in found.values())


def test_pruned_tensors_keep_the_order_of_rows() -> None:
    tensor = StoredTensor.from_floats("x", WEIGHTS).take("x", np.array([5, 2, 9]))
    values = WEIGHTS[[5, 2, 9]]
    found = Pruning("magnitude", {}).pruned(tensor)
    expected = values * largest_two(np.abs(values))
    assert np.array_equal(found.dequantise(), expected)
    assert np.array_equal(found.dequantise_rows([2]), expected[2:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, "wanda", False), "--prune wanda needs --sparsity 2:4"),
        (("4:8", None, False), "--sparsity '4:8' is not supported"),
        (("2:4", "wanda", True), "GGUF has no type for sparse weights; name a folder"),
    ],
)
def test_refused_options(options: tuple[str | None, str | None, bool], message: str) -> None:
    sparsity, prune, is_gguf = options
    with pytest.raises(RequestError, match=message):
        check_pruning(sparsity, prune, is_gguf=is_gguf)


def test_refused_methods_and_columns() -> None:
    with pytest.raises(RequestError, match="--method gptq rounds to integers, and --to bf16"):
        check_method("gptq", "BF16")
    with pytest.raises(RequestError, match="--method awq does not know pruned weights"):
        check_method("awq", named_format("int4-g32"))
    spec, tensors = tiny_model(1, dim=64, heads=4, kv_heads=2, ffn=98, vocab=61)
    with pytest.raises(RequestError, match=r"layers\.0\.down has 98 columns, not a multiple of"):
        check_columns(tensors, quantisable(spec, tensors))
