"""Matrices with a table of scales equal the definition of their codes, in every instruction set."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.packing import add_weight, add_weight_pair, packed_bytes
from headrace.quant.formats import StoredTensor
from headrace.quant.spec import CODEBOOKS
from tests.backend.stored import quantised_rows
from tests.backend.test_cpu_linear import run_rows
from tests.tables import KINDS, random_table

ISAS = _native.isas()
WIDE = {
    kind for kind, spec in KINDS.items() if spec.group == 16 or spec.codebook in ("e4m3", "e5m2")
}
"""Kinds that are multiplied with float32 activations."""
Array = NDArray[Any]


def product(
    isa: str,
    stored: StoredTensor,
    x: Array,
    offset: bool = False,
    threads: int = 1,
    float_activations: bool = False,
) -> Array:
    """x @ W.T by a native plan."""
    plan = _native.Plan(isa, threads)
    if float_activations:
        plan.use_float_activations()
    loose, packed = (plan.add_buffer(x.shape[1], "step", packs) for packs in (False, True))
    out = plan.add_buffer(stored.rows, "step", False)
    plan.embed(
        loose,
        plan.add_weight("F32", *x.shape, x.astype(np.float32).view(np.uint8).reshape(-1), None),
    )
    plan.pack(packed, loose)
    plan.linear(out, packed, add_weight(plan, stored), -1, -1, offset)
    run_rows(plan, len(x))
    return np.array(plan.floats(out, len(x)))


def multiplied(kind: str, stored: StoredTensor) -> Array:
    """The weights that kernels multiply with: looked-up values are rounded to integers of a
    unit.
    """
    weight = stored.dequantise().astype(np.float64)
    spec = KINDS[kind]
    if spec.codebook not in CODEBOOKS or kind in WIDE or stored.cols % 32:
        return weight
    values, top = spec.values.astype(np.float64), float(np.abs(spec.values).max())
    units = [top / (127 - step / 4) for step in range(257)]
    unit = min(units, key=lambda unit: np.square(values - unit * np.rint(values / unit)).sum())
    scales = np.repeat(stored.parts["scales"].astype(np.float64), spec.group, axis=1)[
        :, : stored.cols
    ]
    rounded = (unit * np.rint(values / unit))[stored.parts["codes"]] * scales
    # Relative to the table's largest value: a random weight need not contain it.
    assert np.abs(rounded - weight).max() <= 0.004 * top * np.abs(scales).max()
    return rounded


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(
    num_rows=st.integers(1, 20),
    rows=st.integers(1, 50),
    cols=st.integers(1, 20),
    offset=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_table_format_products(
    isa: str, kind: str, num_rows: int, rows: int, cols: int, offset: bool, seed: int
) -> None:
    cols = (
        32 * cols if seed % 5 else 20 * cols
    )  # columns that fill no group are multiplied with floats
    x = np.random.default_rng(seed).standard_normal((num_rows, cols)).astype(
        np.float32
    ) + np.float32(offset)
    stored = random_table(kind, rows, cols, seed)
    seen = x if kind in WIDE or cols % 32 else quantised_rows(x, offset)
    weight = multiplied(kind, stored)
    error = np.abs(product(isa, stored, x, offset) - seen @ weight.T)
    assert np.all(
        error
        <= 4e-6 * (np.abs(seen) @ np.abs(weight).T + np.abs(seen).sum(axis=1, keepdims=True) * 0.2)
        + 1e-7
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [False, True])
def test_table_format_bits_of_a_row_do_not_depend_on_other_rows(
    isa: str, kind: str, offset: bool
) -> None:
    x = np.random.default_rng(1).standard_normal((37, 256)).astype(np.float32)
    stored = random_table(kind, 50, 256, 2)
    whole = product(isa, stored, x, offset, threads=2)
    for first, last in ((0, 1), (3, 20), (30, 37)):
        assert np.array_equal(whole[first:last], product(isa, stored, x[first:last], offset))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WIDE])
def test_table_formats_with_extreme_codes(isa: str, kind: str) -> None:
    """Sums of 16 bits do not overflow."""
    x = np.ones((6, 256), np.float32) * np.array([[1], [-1], [1], [-1], [0.5], [3]], np.float32)
    x[2:4, ::2] *= -1
    for code in (0, (1 << KINDS[kind].bits) - 1):
        stored = random_table(kind, 16, 256, code, fill=code)
        want = quantised_rows(x, False) @ multiplied(kind, stored).T
        assert np.allclose(product(isa, stored, x), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_table_format_embeddings_are_exact(kind: str) -> None:
    stored = random_table(kind, 48, 512, 6)
    plan = _native.Plan("", 2)
    out = plan.add_buffer(512, "step", False)
    plan.embed(out, add_weight(plan, stored))
    run_rows(plan, 48)
    np.testing.assert_allclose(
        plan.floats(out, 48), stored.dequantise(), rtol=1e-6, atol=1e-8
    )  # scale times code plus minimum is rounded once or twice
    assert plan.weight_bytes == packed_bytes(stored)
    assert (
        KINDS[kind].table_bytes(48, 512)
        <= packed_bytes(stored)
        <= 1.02 * KINDS[kind].table_bytes(48, 512) + 64 * 3
    )


def gated_unit(
    isa: str, gate: StoredTensor, up: StoredTensor, *, as_pair: bool
) -> Array:  # [5, rows]
    """The result of a GluLinear, its matrices packed as a pair or separately."""
    x = np.random.default_rng(3).standard_normal((5, gate.cols)).astype(np.float32)
    plan = _native.Plan(isa, 2)
    loose, packed = (plan.add_buffer(gate.cols, "step", packs) for packs in (False, True))
    out = plan.add_buffer(gate.rows, "step", False)
    plan.embed(loose, plan.add_weight("F32", *x.shape, x.view(np.uint8).reshape(-1), None))
    plan.pack(packed, loose)
    pair = (
        add_weight_pair(plan, gate, up)
        if as_pair
        else (add_weight(plan, gate), add_weight(plan, up))
    )
    plan.glu_linear(out, packed, *pair, -1, -1, "silu")
    run_rows(plan, len(x))
    return np.array(plan.floats(out, len(x)))


@pytest.mark.parametrize("kind", ["int4-point", "e4m3", "nf4"])
def test_table_format_gate_and_up_are_packed_as_a_pair(kind: str) -> None:
    """Packing as a pair changes no bit, also with another row order than the stored one."""
    gate, up = random_table(kind, 40, 128, 1, "gate"), random_table(kind, 40, 128, 2, "up")
    x = np.random.default_rng(3).standard_normal((5, 128)).astype(np.float32)
    assert np.array_equal(*(gated_unit("", gate, up, as_pair=as_pair) for as_pair in (False, True)))
    order = np.random.default_rng(4).permutation(40)
    assert np.array_equal(product("", gate.take("some", order), x), product("", gate, x)[:, order])


def test_table_formats_without_a_kernel_are_refused() -> None:
    for arguments in (
        ("5", 16, 32, 32, "f16", None),
        ("4", 16, 32, 48, "f16", None),
        ("4", 16, 32, 32, "u8", None),
        ("4", 0, 32, 32, "f16", None),
    ):
        with pytest.raises(ValueError):
            _native.TableSpec(*arguments)
    with pytest.raises(ValueError, match="zero point"):
        _native.TableSpec("e4m3", 16, 32, 32, "f16", "u8")
    with pytest.raises(ValueError, match="16 values"):
        _native.TableSpec("lookup", 16, 32, 32, "f16", None, [1.0])
    plan = _native.Plan("", 1)
    weight = plan.add_table(_native.TableSpec("4", 40, 64, 32, "f16", "u8"))
    codes, scales, zeros = (
        np.zeros((32, 64), np.uint8),
        np.zeros((32, 4), np.uint8),
        np.zeros((32, 2), np.uint8),
    )
    plan.fill_table(weight, 0, codes, scales, zeros)
    plan.fill_table(weight, 32, codes[:8], scales[:8], zeros[:8])
    for bad in (
        *(
            (weight + 1, 0, codes, scales, zeros),
            (-1, 0, codes, scales, zeros),
            (weight, 8, codes, scales, zeros),
        ),
        *(
            (weight, 16, codes, scales, zeros),
            (weight, 0, codes[:8], scales[:8], zeros[:8]),
            (weight, 0, codes[:, :32].copy(), scales, zeros),
        ),
        *(
            (weight, 0, codes, scales[:, :2].copy(), zeros),
            (weight, 0, codes, scales, None),
            (weight, 0, codes, scales, zeros[:16]),
        ),
    ):
        with pytest.raises(ValueError):
            plan.fill_table(*bad)
