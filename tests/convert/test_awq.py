"""AWQ: smaller output errors than rounding to nearest, for all kinds of models."""

import numpy as np
import pytest

from headrace.convert import awq as awq_module
from headrace.convert.activation_stats import input_products
from headrace.convert.awq import awq
from headrace.convert.matrices import quantisable
from headrace.convert.scaling import Scalings
from headrace.quant.format_names import named_format
from headrace.quant.rounding import round_to_nearest
from headrace.quant.spec import dequantise_rows
from tests.convert.conversion import quantise
from tests.convert.outliers import judged, with_outliers
from tests.families import spec_of
from tests.tables import KINDS
from tests.tiny import random_tensors, tiny_model

SPEC, PLAIN = tiny_model(2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=61)
TENSORS = with_outliers(SPEC, PLAIN)
PIECES = [list(map(int, piece)) for piece in np.random.default_rng(0).integers(0, 61, (3, 40))]
JUDGED = [list(map(int, piece)) for piece in np.random.default_rng(1).integers(0, 61, (2, 60))]


def test_awq_lowers_output_errors() -> None:
    """The squared error of outputs, by which scalings are chosen, never grows, and
    shrinks a lot with outliers.
    """
    to, names = named_format("int4-g32"), quantisable(SPEC, TENSORS)
    scalings, mean_squares = awq(SPEC, TENSORS, names, to, PIECES, 1, lambda done: None)
    ratios = []
    for products, readers in input_products(SPEC, TENSORS, names, PIECES, 1, lambda done: None):
        errors = []
        for chosen in (Scalings(), scalings):
            error = 0.0
            for name in readers:
                factors = chosen.columns.get(name, np.ones(len(products), np.float32))
                weights = TENSORS[name].dequantise()
                d = (
                    dequantise_rows(to, round_to_nearest(weights * factors, to, clip=False))
                    / factors
                    - weights
                )
                error += float(np.sum(d @ products * d))
                np.testing.assert_allclose(
                    mean_squares[name] * np.square(scalings.columns[name]),
                    np.diag(products),
                    rtol=1e-4,
                )
            errors.append(error)
        assert errors[1] <= errors[0] * (1 + 1e-6)
        ratios.append(errors[1] / errors[0])
    assert len(ratios) == 2 * 4 and min(ratios) < 0.5


@pytest.mark.parametrize("most", [1, 40, 63, 64, 100])
def test_judging_rows_are_as_many_as_may_be(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awq_module, "_MAX_ROWS", most)
    matrix = TENSORS["layers.0.q"]
    rows, all_rows = awq_module._judging_rows(matrix), matrix.dequantise()
    found = [int(np.flatnonzero((all_rows == row).all(axis=1))[0]) for row in rows]
    assert len(found) == min(most, 64) and len(set(np.diff(found))) <= 2
    assert found[0] == 0 and found[-1] >= 63 - 64 // len(found)


@pytest.mark.parametrize("name", ["int4-g32", "int3-g64-asym", "nf4-g64"])
def test_awq_models_are_nearer_than_rounded_ones(name: str) -> None:
    to, names = named_format(name), quantisable(SPEC, TENSORS)
    nearest = judged(SPEC, TENSORS, quantise("rtn", SPEC, TENSORS, names, to), JUDGED).kl
    told: list[float] = []
    result = quantise("awq", SPEC, TENSORS, names, to, PIECES, 1, told.append)
    assert told == sorted(told) and told[0] > 0 and told[-1] <= 1
    ours = judged(SPEC, TENSORS, result, JUDGED).kl
    assert nearest is not None and ours is not None and 0 < ours < 0.8 * nearest
    assert all(
        result[name].format.spec == to and result[name].shape == TENSORS[name].shape
        for name in names
    )


@pytest.mark.parametrize(
    "variant",
    ["mixtral", "qwen2-moe", "deepseek-v3", "gpt2", "falcon-7b", "command-r", "gemma2", "gpt-oss"],
)
def test_awq_quantises_all_families(variant: str) -> None:
    """At 8 bits the result is about as near as a rounded model, although norms, routers
    and biases change.
    """
    spec = spec_of(variant)
    tensors = random_tensors(spec, 3)
    names = quantisable(spec, tensors)
    to = named_format("int8-g32")
    result = quantise("awq", spec, tensors, names, to, PIECES[:1])
    assert result.keys() == tensors.keys()
    assert any(result[name] is not tensors[name] for name in tensors.keys() - set(names))
    nearest = judged(spec, tensors, quantise("rtn", spec, tensors, names, to), JUDGED).kl
    ours = judged(spec, tensors, result, JUDGED).kl
    assert (
        nearest is not None and ours is not None and ours < 2 * nearest < 0.15
    )  # queries in bf16, where that is native, are a part


@pytest.mark.parametrize("kind", [kind for kind, spec in KINDS.items() if spec.bits <= 4])
def test_awq_clips_by_importance(kind: str) -> None:
    spec, rng = KINDS[kind], np.random.default_rng(5)
    weights = rng.standard_normal((32, 320)).astype(np.float32)
    importance = np.exp(rng.normal(0, 3, 320)).astype(np.float32)

    def error(weighed: np.ndarray | None) -> float:
        d = dequantise_rows(spec, round_to_nearest(weights, spec, importance=weighed)) - weights
        return float((np.square(d) * importance).sum())

    assert error(importance) < error(None) and error(np.full(320, 2, np.float32)) == error(None)
