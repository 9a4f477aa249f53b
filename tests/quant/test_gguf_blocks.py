"""GGUF blocks of random bytes whose codes are looked up or have a table of scales."""

import subprocess
import sys

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.grids import grid

BLOCKS = [name for name, form in FORMATS.items() if form.table_rows or form.integers]


def stored(name: str, rows: int, data: NDArray[np.uint8]) -> StoredTensor:
    form = FORMATS[name]
    return StoredTensor.from_bytes(
        "x", form, (rows, data.size // form.nbytes // rows * form.block), data
    )


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 3), blocks=st.integers(1, 3), data=st.data())
def test_random_blocks_equal_gguf_py(
    name: str, rows: int, blocks: int, data: st.DataObject
) -> None:
    """Scales may be infinite or NaN; codes never leave their range."""
    form, size = FORMATS[name], rows * blocks * FORMATS[name].nbytes
    found = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    tensor = stored(name, rows, found)
    with np.errstate(invalid="ignore"):
        want = gguf.quants.dequantize(found.reshape(rows, -1), gguf.GGMLQuantizationType[name])
        np.testing.assert_array_equal(tensor.dequantise(), want)
    assert form.spec
    if form.table_rows is None:
        return
    table = form.table_rows(tensor.parts, slice(None))
    assert (
        table.codes.shape == tensor.shape
        and table.codes.dtype == np.uint8
        and table.codes.max() < 1 << form.spec.bits
    )
    assert table.scales.shape == (rows, form.spec.num_scales(tensor.cols)) and table.zeros is None


@pytest.mark.parametrize("name", BLOCKS)
def test_empty_selection_of_rows(name: str) -> None:
    tensor = stored(name, 2, np.zeros(2 * FORMATS[name].nbytes, np.uint8))
    assert tensor.dequantise_rows([]).shape == (0, FORMATS[name].block)


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
@given(seed=st.integers(0, 2**16))
def test_ternary_weights_come_back(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.integers(-1, 2, (3, 512)) * np.float32(0.375)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(stored(name, 3, packed.reshape(-1)).dequantise(), weights)


def test_the_fourth_code_of_tq2_0_is_two() -> None:
    """No encoder writes it; as a 2-bit integer it needs negated scales."""
    block = np.full(66, 0xFF, np.uint8)
    block[64:] = np.array([0.5], np.float16).view(np.uint8)
    np.testing.assert_array_equal(
        stored("TQ2_0", 1, block).dequantise(), np.ones((1, 256), np.float32)
    )


def test_grids_are_complete_and_distinct() -> None:
    """The points are complete and distinct."""
    for name, count in {
        "iq1": 2048,
        "iq2_xxs": 256,
        "iq2_xs": 512,
        "iq2_s": 1024,
        "iq3_xxs": 256,
        "iq3_s": 512,
    }.items():
        points = grid(name)  # type: ignore[arg-type]
        assert (
            points.shape == (count, 4 if "iq3" in name else 8)
            and len(np.unique(points, axis=0)) == count
        )
        assert np.array_equal(np.unique(points), np.arange(8 if "iq3" in name else 3))


@pytest.mark.parametrize("name", [name for name in BLOCKS if FORMATS[name].integers])
def test_codebook_values(name: str) -> None:
    """With a scale of 1, exactly the codebook's values occur."""
    spec, integers = FORMATS[name].spec, FORMATS[name].integers
    assert spec and integers
    found, of_codebook = integers(), spec.values * np.float32(8 if spec.codebook == "iq1" else 1)
    signed = (
        np.concatenate([found, -found])
        if "iq2" in spec.codebook or "iq3" in spec.codebook
        else found
    )
    shifted = np.concatenate([found - 1, found + 1]) if spec.codebook == "iq1" else signed
    np.testing.assert_array_equal(np.unique(shifted), np.sort(of_codebook))


def test_grids_are_imported_on_demand() -> None:
    code = "import sys, headrace.checkpoint.load; sys.exit('headrace.quant.grids' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
