"""`QuantSpec` describes every quantised format: its bytes, and the values that codes
can have.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.rounding import round_to_nearest
from headrace.quant.spec import NUMBERS, QuantSpec, TableRows, dequantise_rows
from tests.backend.stored import random_stored

SPECS = {name: form.spec for name, form in FORMATS.items() if form.spec}
STORED_ONLY = [name for name in SPECS if not FORMATS[name].table_rows]
"""Formats whose specification describes the file, not the unpacked rows."""


def test_quantised_formats_have_a_spec() -> None:
    assert FORMATS.keys() - SPECS.keys() == {"F32", "F16", "BF16"}


@pytest.mark.parametrize("name", STORED_ONLY)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_spec_gives_the_bytes(name: str, rows: int, blocks: int) -> None:
    cols = blocks * FORMATS[name].block
    assert random_stored(name, rows, cols, 0).nbytes == SPECS[name].table_bytes(rows, cols)


def fits(spec: QuantSpec, values: NDArray[np.float64]) -> bool:
    """Whether some scale, and a minimum if the format has one, maps codes to the values
    of a group.
    """
    codes = spec.values.astype(np.float64)
    least = values.min() if spec.zero == "minimum" else 0.0
    steps = np.arange(1, 1 << spec.bits) if spec.zero == "minimum" else codes[codes != 0]
    around = values - least
    top = around[np.abs(around).argmax()]
    tolerance = 1e-6 * np.abs(values).max()
    scales = top / steps if top else np.ones(1)
    nearest = np.abs(around[None, :, None] - scales[:, None, None] * codes).min(axis=2)
    return bool((nearest <= tolerance).all(axis=1).any())


def groups(name: str, seed: int) -> NDArray[np.float64]:
    """Random values of the format [groups, columns of a group], none of them far
    smaller than its minimum.
    """
    found = random_stored(name, 4, 256, seed, scale=10.0).dequantise().astype(np.float64)
    grouped = found.reshape(-1, SPECS[name].group or 256)
    return grouped[np.ptp(grouped, axis=1) > 1e-3 * np.abs(grouped).max(axis=1)]


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_spec_gives_the_grid_of_values(name: str, seed: int) -> None:
    """Values fit groups of this size and this number of steps, but no coarser grid and
    no other zero.
    """
    spec, found = SPECS[name], groups(name, seed)
    assert len(found) and all(fits(spec, values) for values in found)
    fewer = (
        replace(spec, bits=spec.bits - 1)
        if spec.codebook == "integer"
        else replace(spec, bits=3, codebook="integer")
    )
    mistakes = [fewer, replace(spec, zero="none")] if spec.zero == "minimum" else [fewer]
    for mistaken in mistakes:
        assert not all(fits(mistaken, values) for values in found)


CODES = {"Q2_K": slice(16, 80), "Q4_K": slice(16, 144), "Q5_K": slice(16, 176)}


@pytest.mark.parametrize("name", CODES)
def test_minima_of_super_blocks_are_below_zero(name: str) -> None:
    """Codes of 0 are the minima if their common scale is positive."""
    tensor = random_stored(name, 4, 512, 1, fill=0x11)
    blocks = tensor.parts["codes"].copy()
    blocks[:, :, CODES[name]] = 0
    at = 82 if name == "Q2_K" else 2
    blocks[:, :, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
    assert (
        StoredTensor("x", tensor.format, tensor.shape, {"codes": blocks}).dequantise() < 0
    ).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("zero", "zero_type"), [("point", "u8"), ("minimum", "f16"), ("minimum", "f32")]
)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_zero_points_are_needed(bits: int, zero: Any, zero_type: Any, seed: int) -> None:
    """Weights of a range that is not around 0 return within half a step, which no other
    reading of their codes allows.

    Their zero point is the last code: a zero point in the middle would equal codes
    without one.
    """
    rng = np.random.default_rng(seed)
    weights = (rng.uniform(-1, 0.05, (4, 128)) * np.exp(rng.normal(size=(4, 1)))).astype(np.float32)
    spec = QuantSpec(bits=bits, group=32, scale="f32", zero=zero, zero_type=zero_type)
    rows = round_to_nearest(weights, spec, clip=False)
    assert rows.zeros is not None
    bound = np.repeat(rows.scales, 32, axis=1) * (1.0 if zero == "point" else 0.5) + 1e-3 * np.abs(
        weights
    ).max(axis=1, keepdims=True)

    def is_near(spec: QuantSpec, rows: TableRows) -> bool:
        return bool((np.abs(dequantise_rows(spec, rows) - weights) <= bound).all())

    assert is_near(spec, rows)
    assert not is_near(
        replace(spec, zero="none", zero_type=None), TableRows(rows.codes, rows.scales)
    )
    turned = rows._replace(zeros=-rows.zeros.astype(NUMBERS["f32"]))
    assert not is_near(replace(spec, zero_type="f32"), turned)
    other = "minimum" if zero == "point" else "point"
    assert not is_near(replace(spec, zero=other), rows)
