"""Linear kernels in every format of weights, against products in float64, and row by row against
themselves.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.embed import embed_position
from headrace.backend.cuda.kernels.head_linear import head_linear
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.quantise_rows import quantise_rows
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.packing import pack
from headrace.backend.cuda.workspace import Workspace
from headrace.backend.reference.activations import activated, gated
from headrace.errors import UnsupportedModelError
from headrace.quant.formats import FORMATS
from headrace.quant.kv import round_bf16
from tests.backend.cuda.examples import examples
from tests.backend.cuda.matrices import FORMAT_NAMES, SUPER_BLOCKS, any_bytes, random_matrix
from tests.backend.stored import random_stored

Array = NDArray[Any]
ONE_OF_EACH = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "MXFP4",
    "int4-point",
    "e4m3",
]
ACTIVATIONS = ["", "silu", "gelu", "gelu_tanh", "relu"]


def on_device(x: Array, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(DEVICE, dtype)


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=examples(2), deadline=None)
@given(
    num_rows=st.integers(1, 20),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    bf16=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products_are_those_of_the_values(
    name: str, num_rows: int, rows: int, blocks: int, bf16: bool, seed: int
) -> None:
    """With activations in bf16, weights are rounded to that, too, unless they are float16 or
    float32.
    """
    stored = random_matrix(name, rows, blocks, seed)
    x = normal(np.random.default_rng(seed), num_rows, stored.cols)
    out = torch.full((num_rows, rows), torch.nan, device=DEVICE)
    linear(out, on_device(x, torch.bfloat16 if bf16 else torch.float32), pack([stored]))()
    weight, seen = stored.dequantise().astype(np.float64), x.astype(np.float64)
    if bf16:
        seen = round_bf16(seen)
        weight = weight if name in ("F32", "F16") else round_bf16(weight)
    error, size = np.abs(out.cpu().numpy() - seen @ weight.T), np.abs(seen) @ np.abs(weight).T
    assert np.all(error <= 1e-6 * size + 1e-9)


@pytest.mark.parametrize("name", SUPER_BLOCKS)
@pytest.mark.parametrize("num_rows", [32, 128])
def test_scales_of_super_blocks_are_exact(name: str, num_rows: int) -> None:
    """Products with rows of an identity are the values, to the bit, in kernels for few rows and for
    many.
    """
    stored = random_matrix(name, 20, 3, 5)
    weight, out = pack([stored]), torch.empty(num_rows, 20, device=DEVICE)
    for first in range(0, stored.cols, num_rows):
        x = np.eye(num_rows, stored.cols, first, dtype=np.float32)
        linear(out, on_device(x), weight)()
        assert np.array_equal(out.cpu().numpy().T, stored.dequantise()[:, first : first + num_rows])


@pytest.mark.parametrize("name", SUPER_BLOCKS)
@settings(max_examples=examples(3), deadline=None)
@given(blocks=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_scales_may_be_whatever_a_file_holds(name: str, blocks: int, seed: int) -> None:
    """Units that are subnormal, infinite or no number give the values that they have everywhere."""
    stored = any_bytes(name, 40, blocks, seed)
    out = torch.empty(40, stored.cols, device=DEVICE)
    with np.errstate(invalid="ignore"):
        embed_position(out, pack([stored]), torch.arange(40, dtype=torch.int32, device=DEVICE))()
        assert np.array_equal(out.cpu().numpy(), stored.dequantise(), equal_nan=True)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    stored = random_matrix(name, 40, 2, 1)
    weight, x = (
        pack([stored]),
        on_device(normal(np.random.default_rng(1), 70, stored.cols), torch.bfloat16),
    )

    def product(first: int, last: int) -> torch.Tensor:
        out = torch.empty(last - first, 40, device=DEVICE)
        linear(out, x[first:last], weight)()
        return out

    whole = product(0, 70)
    for first, last in ((0, 1), (3, 20), (30, 70)):
        assert torch.equal(whole[first:last], product(first, last))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K"])
def test_ranges_of_columns_are_added_in_order(name: str, gate: bool) -> None:
    """A few rows are summed by a program for each range of columns, many by one program, to the
    same bits; the count of programs is 0 again for the next launch.
    """
    stored = random_matrix(name, 42, 1300 // FORMATS[name].block, 1)
    weight, workspace = pack([stored]), Workspace()
    x = on_device(normal(np.random.default_rng(1), 70, stored.cols), torch.bfloat16)

    def launch(rows: int) -> Launch:
        out = torch.full((rows, 21 if gate else 42), torch.nan, device=DEVICE)
        activation = "silu" if gate else ""
        return linear(out, x[:rows], weight, gate=gate, activation=activation, workspace=workspace)

    few, many = launch(20), launch(70)
    if is_interpreting():
        assert few.constants["PARALLEL"] and not many.constants["PARALLEL"]
        assert few.constants["SPLITS"] == many.constants["SPLITS"] == 2
    for one in (many, few, few):
        one()
    assert torch.equal(few.args[0], many.args[0][:20])


@settings(max_examples=examples(12), deadline=None)
@given(
    name=st.sampled_from(["F32", "Q4_1", "Q8_0"]),
    activation=st.sampled_from(ACTIVATIONS),
    has=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    gate=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_what_follows_a_product(
    name: str, activation: str, has: tuple[bool, bool, bool], gate: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    activation = activation or "clamped_swiglu" if gate else activation
    stored = random_matrix(name, 2 * 21, 1, seed)
    num_rows, outputs = 5, 21 if gate else 42
    x, bias, residual, delta = (
        normal(rng, *shape)
        for shape in ((num_rows, stored.cols), (42,), (num_rows, outputs), (num_rows, 42))
    )
    wide = torch.full((num_rows, outputs + 3), torch.nan, device=DEVICE)  # rows with a distance
    given_ = {
        key: on_device(a)
        for key, a, one in zip(
            ("bias", "residual", "delta"), (bias, residual, delta), has, strict=True
        )
        if one
    }
    linear(
        wide[:, :outputs], on_device(x), pack([stored]), activation=activation, gate=gate, **given_
    )()
    y = x.astype(np.float64) @ stored.dequantise().T + has[0] * bias + has[2] * delta
    if gate:
        y = gated(y[:, :21], y[:, 21:], activation)
    elif activation:
        y = activated(y, activation)
    assert np.allclose(wide[:, :outputs].cpu().numpy(), y + has[1] * residual, rtol=1e-5, atol=1e-5)
    assert wide[:, outputs:].isnan().all()


def test_matrices_of_one_layout_lie_below_each_other() -> None:
    parts = [random_matrix("Q4_0", rows, 3, rows) for rows in (7, 20)]
    x = on_device(normal(np.random.default_rng(0), 3, parts[0].cols))
    together, apart = torch.empty(3, 27, device=DEVICE), torch.empty(3, 27, device=DEVICE)
    linear(together, x, pack(parts))()
    for part, columns in zip(parts, (slice(0, 7), slice(7, 27)), strict=True):
        linear(apart[:, columns], x, pack([part]))()
    assert torch.equal(together, apart)


def test_numbers_that_are_none_stay_in_their_row() -> None:
    stored = random_matrix("Q8_0", 20, 2, 0)
    x = normal(np.random.default_rng(0), 4, stored.cols)
    x[2, 5] = np.nan
    out = torch.empty(4, 20, device=DEVICE)
    linear(out, on_device(x, torch.bfloat16), pack([stored]))()
    assert out[2].isnan().all() and out[[0, 1, 3]].isfinite().all()


@settings(max_examples=examples(6), deadline=None)
@given(
    mixed=st.booleans(), num_rows=st.integers(1, 18), gate=st.booleans(), seed=st.integers(0, 2**16)
)
def test_rows_and_weights_in_int8(mixed: bool, num_rows: int, gate: bool, seed: int) -> None:
    """Products of integers are exact, and so are outliers beside them, up to what two numbers in
    bf16 leave of these.
    """
    stored = random_matrix("I8_MIXED" if mixed else "I8_ROW", 38, 5, seed)
    x = normal(np.random.default_rng(seed), num_rows, stored.cols)
    x[0, :2] = 11.5, -7.25
    weight, rows = pack([stored]), on_device(x)
    codes = torch.empty(
        num_rows, weight.layout.padded_cols(stored.cols), dtype=torch.int8, device=DEVICE
    )
    scales, out = (
        torch.empty(num_rows, device=DEVICE),
        torch.empty(num_rows, 19 if gate else 38, device=DEVICE),
    )
    quantise_rows(codes, scales, rows, mixed)()
    linear(
        out, rows, weight, quantised=(codes, scales), gate=gate, activation="silu" if gate else ""
    )()
    seen = codes[:, : stored.cols].cpu().numpy().astype(np.float64) * scales.cpu().numpy()[
        :, None
    ].astype(np.float64)
    if mixed:
        seen = np.where(np.abs(x) > 6, x, seen)
    y = seen @ stored.dequantise().astype(np.float64).T
    assert (
        np.abs(seen - x).max()
        <= np.abs(x if not mixed else np.where(np.abs(x) > 6, 0, x)).max() / 250
    )
    assert np.allclose(
        out.cpu().numpy(), gated(y[:, :19], y[:, 19:], "silu") if gate else y, rtol=1e-5, atol=1e-6
    )


@settings(max_examples=examples(4), deadline=None)
@given(
    shared=st.booleans(),
    num_rows=st.integers(1, 18),
    name=st.sampled_from(["F32", "Q4_0"]),
    seed=st.integers(0, 2**16),
)
def test_heads_with_matrices_of_their_own(
    shared: bool, num_rows: int, name: str, seed: int
) -> None:
    heads = [random_stored(name, 11, 32, seed + i) for i in range(3)]
    cols = heads[0].cols
    x = normal(np.random.default_rng(seed), num_rows, cols if shared else 3 * cols)
    out = torch.empty(num_rows, 33, device=DEVICE)
    head_linear(out, on_device(x), pack(heads), 3)()
    parts = [x if shared else x[:, i * cols : (i + 1) * cols] for i in range(3)]
    want = np.concatenate(
        [part @ head.dequantise().T for part, head in zip(parts, heads, strict=True)], axis=1
    )
    assert np.allclose(out.cpu().numpy(), want, rtol=1e-4, atol=1e-5)


def test_scales_of_16_bits_are_two_numbers_in_bf16() -> None:
    """What kernels of a GPU rely on: codes times scales have the same bits when they are multiplied
    in two parts, each in bf16.
    """
    scales = torch.arange(1 << 16).to(torch.int16).view(torch.float16).float()
    scales = scales[scales.isfinite()]
    high = scales.bfloat16().float()
    low = scales - high
    assert torch.equal(low, low.bfloat16().float())
    for code in range(-16, 16):
        rest = (code * low).bfloat16().float()
        assert torch.equal(rest, code * low)
        assert torch.equal(
            (code * high + rest).bfloat16(), (code * scales).bfloat16()
        )  # float32 has the sums without rounding


def test_zero_points_far_beyond_the_codes_are_refused() -> None:
    stored = random_matrix("int4-point", 8, 4, 0)
    assert pack([stored]).zeros is not None
    stored.parts["zeros"][0, 0] = 129
    with pytest.raises(UnsupportedModelError, match="zero points above 128"):
        pack([stored])
