"""int4 keys that are rounded with error feedback."""

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.quant.key_rounding import key_rounding
from headrace.quant.kv import hadamard, round_trip

Doubles = NDArray[np.float64]
HEADS, SIZE = 2, 64


def keys_and_queries(seed: int) -> tuple[Doubles, Doubles]:
    """Keys around a centre, and queries in few directions: [rows, heads, numbers]."""
    rng = np.random.default_rng(seed)
    centre = 4 * rng.standard_normal((HEADS, SIZE))
    mixing = rng.standard_normal((2, HEADS, SIZE, SIZE)) * np.geomspace(3, 0.03, SIZE)[:, None]
    keys, queries = (
        np.einsum("thi,hij->thj", rng.standard_normal((400, HEADS, SIZE)), each) for each in mixing
    )
    return keys + centre, queries


def second_moment(queries: Doubles) -> Doubles:
    return np.einsum("thi,thj->hij", queries, queries) / len(queries)


def product_error(keys: Doubles, rounded: Doubles, queries: Doubles) -> float:
    """Variance of the errors of products, as a softmax sees them."""
    products = np.einsum("qhi,khi->hqk", queries, rounded - keys)
    return float((products - products.mean(axis=2, keepdims=True)).var())


@pytest.mark.parametrize("seed", range(3))
def test_feedback_keeps_products_of_other_queries(seed: int) -> None:
    keys, queries = keys_and_queries(seed)
    measured, others = queries[:200], queries[200:]
    plain = product_error(keys, round_trip(keys, "int4"), others)
    rounding = key_rounding(0, second_moment(measured), keys.mean(axis=0))
    assert rounding
    got = product_error(keys, round_trip(keys, "int4", rounding), others)
    assert got < plain / 4
    uncentred = key_rounding(0, second_moment(measured), np.zeros((HEADS, SIZE)))
    assert uncentred
    between = product_error(keys, round_trip(keys, "int4", uncentred), others)
    assert got < between < plain


def test_keys_are_stored_without_their_centre() -> None:
    keys, queries = keys_and_queries(0)
    rounding = key_rounding(0, second_moment(queries), keys.mean(axis=0))
    assert rounding
    stored = round_trip(keys, "int4", rounding) + rounding.centre
    assert np.abs(stored - keys).max() < 0.6 * np.abs(keys - keys.mean(axis=0)).max()
    assert np.linalg.norm(stored.mean(axis=0) - keys.mean(axis=0)) < 0.1 * np.linalg.norm(
        keys.mean(axis=0)
    )


def test_feedback_is_upper_and_bf16() -> None:
    _, queries = keys_and_queries(0)
    rounding = key_rounding(3, second_moment(queries), np.zeros((HEADS, SIZE)))
    assert rounding and rounding.layer == 3
    assert (np.tril(rounding.feedback) == 0).all()
    assert (rounding.feedback.view(np.uint32) & 0xFFFF == 0).all()


def test_queries_alike_in_all_directions_round_each_number_alone() -> None:
    rounding = key_rounding(0, np.tile(np.eye(SIZE), (HEADS, 1, 1)), np.zeros((HEADS, SIZE)))
    assert rounding
    assert np.abs(rounding.feedback).max() < 1e-6
    turned = hadamard(SIZE)
    np.testing.assert_allclose(turned @ turned, np.eye(SIZE), atol=1e-12)


@pytest.mark.parametrize("bad", ["zeros", "nan"])
def test_keys_without_usable_queries_have_no_rounding(bad: str) -> None:
    keys, queries = keys_and_queries(0)
    moment = second_moment(queries)
    moment[1] = 0 if bad == "zeros" else np.nan
    assert key_rounding(0, moment, keys.mean(axis=0)) is None
