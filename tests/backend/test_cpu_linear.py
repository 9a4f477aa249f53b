"""Products in every packed format and instruction set equal the definition of the format."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.packing import add_weight
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.kv import round_bf16
from tests.backend.stored import quantised_rows, random_stored

ISAS = _native.isas()
Array = NDArray[Any]


def linear(
    isa: str,
    format_name: str,
    x: Array,
    rows: int,
    seed: int,
    offset: bool = False,
    threads: int = 1,
    order: Array | None = None,
) -> Array:
    return product(
        isa, random_stored(format_name, rows, x.shape[1], seed), x, offset, threads, order
    )


def product(
    isa: str,
    stored: StoredTensor,
    x: Array,
    offset: bool = False,
    threads: int = 1,
    order: Array | None = None,
) -> Array:
    """x @ W.T by a native plan, with the rows of x in a float32 embedding."""
    plan = _native.Plan(isa, threads)
    num_rows, cols = x.shape
    loose, packed = (plan.add_buffer(cols, "step", packs) for packs in (False, True))
    out = plan.add_buffer(stored.rows, "step", False)
    plan.embed(
        loose,
        plan.add_weight(
            "F32", num_rows, cols, x.astype(np.float32).view(np.uint8).reshape(-1), None
        ),
    )
    plan.pack(packed, loose)
    plan.linear(out, packed, add_weight(plan, replace(stored, row_order=order)), -1, -1, offset)
    run_rows(plan, num_rows)
    return np.array(plan.floats(out, num_rows))


def run_rows(plan: _native.Plan, num_rows: int) -> None:
    """Run a step of `num_rows` sequences with one row each; row i has token i."""
    i32 = lambda x: np.ascontiguousarray(x, np.int32)  # noqa: E731
    rows, zeros = np.arange(num_rows), np.zeros(num_rows)
    plan.run(
        i32(rows),
        i32(zeros),
        i32(np.arange(num_rows + 1)),
        i32(zeros),
        i32(zeros + 1),
        (),
        None,
        i32([0]),
    )


def exact(isa: str, stored: StoredTensor, x: Array, offset: bool) -> tuple[Array, Array]:
    """The exact product with the packed activations, and the scale of its rounding error."""
    weight = stored.dequantise().astype(np.float64)
    if "row_scales" in stored.format.parts:
        x = quantised_rows(x, False, x.shape[1])
    elif stored.format.quantised and not stored.format.needs_floats:
        x = quantised_rows(x, offset)
    elif stored.format.name == "BF16" and isa == "avx512bf16":
        x = round_bf16(x)
    return x @ weight.T, np.abs(x) @ np.abs(weight).T


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format_name", FORMATS)
@settings(max_examples=12, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 7),
    offset=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_linear_matches_the_stored_format(
    isa: str, format_name: str, num_rows: int, rows: int, blocks: int, offset: bool, seed: int
) -> None:
    block = FORMATS[format_name].block
    cols = block * min(blocks, 3) if block > 1 else 7 * blocks
    x = np.random.default_rng(seed).standard_normal((num_rows, cols)).astype(
        np.float32
    ) + np.float32(offset)
    got = linear(isa, format_name, x, rows, seed, offset)
    want, error_scale = exact(isa, random_stored(format_name, rows, cols, seed), x, offset)
    assert np.all(np.abs(got - want) <= 2e-6 * error_scale + 1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("offset", [False, True])
def test_linear_bits_of_a_row_do_not_depend_on_other_rows(
    isa: str, format_name: str, offset: bool
) -> None:
    """Promise 1: bit-equal alone, in any block of rows, on one thread or two."""
    x = np.random.default_rng(1).standard_normal((37, 256)).astype(np.float32)
    whole = linear(isa, format_name, x, 50, 2, offset, threads=2)
    for first, last in ((0, 1), (5, 6), (3, 20), (0, 36), (30, 37)):
        assert np.array_equal(
            whole[first:last], linear(isa, format_name, x[first:last], 50, 2, offset)
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    "format_name",
    [name for name, form in FORMATS.items() if form.quantised and not form.needs_floats],
)
def test_linear_with_extreme_codes_and_activations(
    isa: str, format_name: str, offset: bool
) -> None:
    """Partial sums have 16 bits in some kernels."""
    x = np.ones((6, 256), np.float32) * np.array([[1], [-1], [1], [-1], [0.5], [3]], np.float32)
    x[2:4, ::2] *= -1
    if offset:
        x[:, 5::32] *= -1  # the middle of the range stays at 0
    for byte in (0x00, 0x77, 0x7F, 0x80, 0xF0, 0xFF):
        stored = random_stored(format_name, 16, 256, byte, fill=byte)
        want, error_scale = exact(isa, stored, x, offset)
        assert np.all(
            np.abs(product(isa, stored, x, offset) - want) <= 2e-6 * error_scale.max() + 1e-7
        )  # a minimum may cancel a weight


@pytest.mark.parametrize("format_name", FORMATS)
def test_row_order_permutes_outputs(format_name: str) -> None:
    x = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    order = np.random.default_rng(4).permutation(48)
    assert np.array_equal(
        linear(ISAS[-1], format_name, x, 48, 5, order=order),
        linear(ISAS[-1], format_name, x, 48, 5)[:, order],
    )


@pytest.mark.parametrize("isa", ISAS)
def test_linear_of_the_longest_row_does_not_overflow(isa: str) -> None:
    """Sums of int8 by row have 32 bits: 131,072 extreme products fit, one column more is
    refused.
    """
    cols = 1 << 17
    data = np.repeat(np.array([-128, 127], np.int8), cols).view(np.uint8)
    scales = np.array([1.0, 2.0], np.float32)
    stored = StoredTensor.from_bytes("w", FORMATS["I8_ROW"], (2, cols), data, row_scales=scales)
    x = np.ones((3, cols), np.float32) * np.array([[1], [-1], [0.5]], np.float32)
    want = quantised_rows(x, False, cols) @ stored.dequantise().astype(np.float64).T
    assert np.allclose(product(isa, stored, x), want, rtol=1e-6)
    plan = _native.Plan(isa, 1)
    with pytest.raises(ValueError, match="131,072 columns"):
        plan.add_weight("I8_ROW", 1, cols + 1, np.zeros(cols + 1, np.uint8), None, scales[:1])


def test_scales_are_required_by_format() -> None:
    plan = _native.Plan("", 1)
    for name, scales in (
        ("I8_ROW", None),
        ("I8_ROW", np.ones(3, np.float32)),
        ("F32", np.ones(2, np.float32)),
    ):
        with pytest.raises(ValueError, match="a scale for each row"):
            plan.add_weight(name, 2, 4, np.zeros(8 * FORMATS[name].nbytes, np.uint8), None, scales)
    for name, scales in (
        ("MXFP4_PAIRS", None),
        ("MXFP4_PAIRS", np.ones(3, np.uint8)),
        ("MXFP4", np.ones((2, 2), np.uint8)),
    ):
        with pytest.raises(ValueError, match="a scale for each block"):
            plan.add_weight(name, 2, 64, np.zeros(4 * FORMATS[name].nbytes, np.uint8), None, scales)


@pytest.mark.parametrize("name", ["MXFP4", "MXFP4_PAIRS"])
def test_every_value_of_float_codes_is_exact(name: str) -> None:
    """Each code times each power of two, as an embedding. Powers below 2^-126 count as 0."""
    exponents, codes = np.arange(256, dtype=np.uint8), np.arange(16, dtype=np.uint8)
    if name == "MXFP4":
        blocks = np.concatenate(
            [exponents[:, None], np.tile(codes | (codes[::-1] << np.uint8(4)), (256, 1))], axis=1
        )
        stored = StoredTensor.from_bytes(
            "w", FORMATS[name], (256, 32), np.ascontiguousarray(blocks).reshape(-1)
        )
    else:
        blocks = np.tile(codes | (codes[::-1] << np.uint8(4)), 256)
        stored = StoredTensor.from_bytes(
            "w", FORMATS[name], (256, 32), blocks, block_scales=exponents[:, None].copy()
        )
    plan = _native.Plan("", 1)
    out = plan.add_buffer(32, "step", False)
    plan.embed(out, plan.add_weight(name, 256, 32, stored.parts["codes"], None, stored.scales))
    run_rows(plan, 256)
    want = stored.dequantise()
    want[:2] = 0
    np.testing.assert_array_equal(plan.floats(out, 256), want)
    assert len(np.unique(want[127])) == 15


@pytest.mark.parametrize(
    "name", [name for name, form in FORMATS.items() if form.block > 1 and "MXFP4" not in name]
)
def test_every_code_of_a_row_is_exact(name: str) -> None:
    """Random codes of a row, as an embedding."""
    stored = random_stored(name, 32, 512, 6)
    plan = _native.Plan("", 1)
    out = plan.add_buffer(512, "step", False)
    plan.embed(out, add_weight(plan, stored))
    run_rows(plan, 32)
    np.testing.assert_array_equal(plan.floats(out, 32), stored.dequantise())


def test_row_scales_need_whole_rows() -> None:
    """Row scales need the maximum of the complete row, so a plan that packs groups of it is
    refused.
    """
    plan = _native.Plan("", 1)
    x, y, out = (plan.add_buffer(32, "step", packed) for packed in (True, True, False))
    by_row, by_group = (
        plan.add_weight(t.format.name, 32, 32, t.parts["codes"], None, t.scales)
        for t in (random_stored(f, 32, 32, 0) for f in ("I8_ROW", "Q8_0"))
    )
    plan.glu_linear(y, x, by_group, by_group, -1, -1, "silu")
    with pytest.raises(ValueError, match="in pieces"):
        plan.linear(out, y, by_row, -1, -1, False)
    plan.linear(out, x, by_row, -1, -1, False)
    plan.add_kv_group(1, 1, 32, 32, 0, 1, "f32")
    with pytest.raises(ValueError, match="in pieces"):
        plan.attention(x, out, (0, 0), 1, 32, 1.0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("offset", [False, True])
def test_linear_of_extreme_codes_does_not_saturate(isa: str, offset: bool) -> None:
    """Extreme codes times extreme activations."""
    for format_name in ("Q8_0", "Q4_0", "Q5_1", "Q6_K", "MXFP4"):
        stored = random_stored(format_name, 16, 256, 0)
        for fill in (0x00, 0xFF, 0x80, 0x7F, 0x77):
            data = stored.parts["codes"].copy()
            keep = {
                "Q8_0": slice(0, 2),
                "Q4_0": slice(0, 2),
                "Q5_1": slice(0, 4),
                "Q6_K": slice(208, 210),
                "MXFP4": slice(0, 1),
            }[format_name]
            scales = data[:, :, keep].copy()
            data[:] = fill
            data[:, :, keep] = scales
            stored.parts["codes"][:] = data
            for sign in (1, -1):
                x = np.full((3, 256), sign, np.float32)
                x[1, ::2] = -sign
                got = product(isa, stored, x, offset)
                want = quantised_rows(x, offset) @ stored.dequantise().astype(np.float64).T
                assert np.allclose(got, want, rtol=1e-5, atol=1e-5)
