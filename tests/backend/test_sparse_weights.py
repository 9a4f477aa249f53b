"""2:4 weights have the bits of the dense matrix, in every instruction set."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.packing import add_weight, packed_bytes
from headrace.errors import UnsupportedModelError
from headrace.quant.formats import FORMATS, StoredTensor, plain_table
from headrace.quant.sparse import spread
from tests.backend.test_cpu_linear import run_rows
from tests.backend.test_table_formats import gated_unit, product
from tests.tables import SPARSE_KINDS, random_table

ISAS = _native.isas()
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 40)
"""Numbers of rows with kernels of their own, and more than one block of rows."""


def dense(stored: StoredTensor) -> StoredTensor:
    """The same matrix with all values stored."""
    spec, parts = stored.format.spec, stored.parts
    assert spec
    if spec.codebook == "bf16":
        values = spread(parts["codes"], parts["places"])
        return StoredTensor.from_bytes(
            stored.name, FORMATS["BF16"], stored.shape, values.view(np.uint8).reshape(-1)
        )
    middle = np.uint8(1 << spec.bits - 1)
    signed = spread(parts["codes"] ^ middle, parts["places"])
    if spec.needs_rows_in_int8:
        scales = parts["scales"].reshape(-1)
        form = FORMATS["I8_ROW"]
        return StoredTensor.from_bytes(
            stored.name, form, stored.shape, signed.reshape(-1), row_scales=scales
        )
    codes = {"codes": signed ^ middle, "scales": parts["scales"]}
    return replace(stored, format=plain_table(replace(spec, is_sparse=False)), parts=codes)


def random_rows(num_rows: int, cols: int, offset: bool = False) -> NDArray[np.float32]:
    x = np.random.default_rng(num_rows).standard_normal((num_rows, cols))
    return (x + offset).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", SPARSE_KINDS)
@pytest.mark.parametrize("offset", [False, True])
def test_sparse_products_have_the_bits_of_dense_ones(isa: str, kind: str, offset: bool) -> None:
    stored = random_table(kind, 50, 160, 1)
    for num_rows in ROWS:
        x = random_rows(num_rows, 160, offset)
        found = product(isa, stored, x, offset, threads=1 + num_rows % 2)
        assert found.any() and np.array_equal(found, product(isa, dense(stored), x, offset))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", SPARSE_KINDS)
@settings(max_examples=8, deadline=None)
@given(
    num_rows=st.integers(1, 18),
    rows=st.integers(1, 40),
    groups=st.integers(1, 50),
    as_floats=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_sparse_products_of_any_shape(
    isa: str, kind: str, num_rows: int, rows: int, groups: int, as_floats: bool, seed: int
) -> None:
    stored, x = random_table(kind, rows, 4 * groups, seed), random_rows(num_rows, 4 * groups)
    found, expected = (
        product(isa, matrix, x, float_activations=as_floats) for matrix in (stored, dense(stored))
    )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_sparse_bits_of_a_row_do_not_depend_on_other_rows(isa: str, kind: str) -> None:
    stored, x = random_table(kind, 50, 256, 2), random_rows(37, 256)
    whole = product(isa, stored, x, threads=2)
    for first, last in ((0, 1), (3, 20), (30, 37)):
        assert np.array_equal(whole[first:last], product(isa, stored, x[first:last]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["int8-row-2:4", "int8-2:4", "int4-2:4"])
def test_sparse_products_of_extreme_codes(isa: str, kind: str) -> None:
    """No sum of 16 bits overflows."""
    x = np.ones((5, 256), np.float32) * np.array([[1], [-1], [3], [-3], [0.5]], np.float32)
    x[2:, ::2] *= -1
    for code in (0, (1 << SPARSE_KINDS[kind].bits) - 1):
        stored = random_table(kind, 16, 256, code, fill=code)
        assert np.array_equal(product(isa, stored, x), product(isa, dense(stored), x))


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_sparse_embeddings_and_bytes_are_exact(kind: str) -> None:
    stored = random_table(kind, 48, 512, 6)
    plan = _native.Plan("", 2)
    out = plan.add_buffer(512, "step", False)
    plan.embed(out, add_weight(plan, stored))
    run_rows(plan, 48)
    assert np.array_equal(plan.floats(out, 48), stored.dequantise())
    assert plan.weight_bytes == packed_bytes(stored) == SPARSE_KINDS[kind].table_bytes(48, 512)


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_sparse_gate_and_up_are_packed_as_a_pair(kind: str) -> None:
    gate, up = random_table(kind, 40, 128, 1, "gate"), random_table(kind, 40, 128, 2, "up")
    pair = gated_unit("", gate, up, as_pair=True)
    assert np.array_equal(pair, gated_unit("", gate, up, as_pair=False))
    assert np.array_equal(pair, gated_unit("", dense(gate), dense(up), as_pair=True))
    order, x = np.random.default_rng(4).permutation(40), random_rows(3, 128)
    assert np.array_equal(product("", gate.take("some", order), x), product("", gate, x)[:, order])


@pytest.mark.parametrize("kind", SPARSE_KINDS)
@pytest.mark.parametrize("cols", [64, 36])
def test_damaged_places_are_refused_by_the_packer(kind: str, cols: int) -> None:
    stored = random_table(kind, 20, cols, 0)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        places = stored.parts["places"].copy()
        places[rng.integers(20), rng.integers(places.shape[1])] ^= np.uint8(1 << seed % 8)
        damaged = replace(stored, parts={**stored.parts, "places": places})
        with pytest.raises(UnsupportedModelError, match=r"tensor w: .*places are damaged"):
            add_weight(_native.Plan("", 2), damaged)


def spec(*arguments: Any) -> _native.TableSpec:
    return _native.TableSpec(*arguments)


def test_sparse_matrices_that_no_kernel_reads_are_refused() -> None:
    for arguments, why in (
        (("2:4 int4", 16, 34, 32, "f16", None), "multiple of 4"),
        (("2:4 int4", 16, 32, 32, "f16", "u8"), "zero point"),
        (("2:4 int8 by row", 16, 64, 32, "f32", None), "one scale a row"),
        (("2:4 int8 by row", 16, 64, 64, "f16", None), "one scale a row"),
        (("2:4 bf16", 16, 64, 64, "f16", None), "bf16 has none"),
        (("2:4 int8", 16, 64, 64, "none", None), "scales are floats"),
        (("2:4 int5", 16, 64, 64, "f16", None), "no kernel"),
    ):
        with pytest.raises(ValueError, match=why):
            spec(*arguments)
    plan = _native.Plan("", 1)
    weight = plan.add_table(spec("2:4 int4", 16, 64, 32, "f16", None))
    other = plan.add_table(spec("4", 16, 64, 32, "f16", None))
    codes, scales = np.zeros((16, 32), np.uint8), np.zeros((16, 4), np.uint8)
    places = np.full((16, 8), 0b0011_0011, np.uint8)
    plan.fill_table(weight, 0, codes, scales, None, places)
    for bad in (
        (weight, 0, codes, scales, None, None),
        (weight, 0, codes, scales, None, places[:, :7].copy()),
        (weight, 0, codes, scales, None, places[:15].copy()),
        (weight, 0, np.zeros((16, 64), np.uint8), scales, None, places),
        (other, 0, np.zeros((16, 64), np.uint8), scales, None, places),
    ):
        with pytest.raises(ValueError, match=r"2:4|kept"):
            plan.fill_table(*bad)
