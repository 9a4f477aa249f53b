"""GGUF blocks of any bytes: kernels equal their definition in NumPy (`quant/gguf_blocks.py`)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.packing import add_weight, packed_bytes
from headrace.quant.formats import FORMATS, StoredTensor, table_format
from tests.backend.stored import random_stored
from tests.backend.test_cpu_linear import product, run_rows
from tests.backend.test_table_formats import gated_unit

ISAS = _native.isas()
TABLES = [name for name, form in FORMATS.items() if form.table_rows]
LOOKUPS = [name for name, form in FORMATS.items() if form.integers]
GRIDS = [name for name in LOOKUPS if name != "IQ4_XS"]
HALF_SCALED = [
    name
    for name, form in FORMATS.items()
    if form.block > 1 and len(form.parts) == 1 and name not in ("MXFP4", "NVFP4")
]
"""Formats whose scale may be infinite or NaN; powers of two and e4m3 never are in ggml."""
SCALE = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}
"""Offset of the float16 scale in a block, if it is not 0."""
Array = NDArray[Any]


def embedded(stored: StoredTensor) -> Array:
    """The rows of a packed matrix as bits, so that NaNs can be compared."""
    plan = _native.Plan("", 2)
    out = plan.add_buffer(stored.cols, "step", False)
    plan.embed(out, add_weight(plan, stored))
    run_rows(plan, stored.rows)
    rows = np.array(plan.floats(out, stored.rows))
    return np.where(np.isnan(rows), np.float32(np.nan), rows)


def any_blocks(name: str, rows: int, blocks: int, seed: int, permuted: bool) -> StoredTensor:
    form, rng = FORMATS[name], np.random.default_rng(seed)
    stored = StoredTensor.from_bytes(
        "w",
        form,
        (rows, blocks * form.block),
        rng.integers(0, 256, rows * blocks * form.nbytes, np.uint8),
    )
    return replace(stored, row_order=rng.permutation(rows) if permuted else None)


@pytest.mark.parametrize("name", LOOKUPS)
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    permuted=st.booleans(),
)
def test_lookup_values_are_exact(
    name: str, rows: int, blocks: int, seed: int, permuted: bool
) -> None:
    stored = any_blocks(name, rows, blocks, seed, permuted)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(embedded(stored), stored.dequantise())


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    permuted=st.booleans(),
)
def test_lookup_products_equal_reference(
    name: str, rows: int, blocks: int, seed: int, permuted: bool
) -> None:
    """Packing from blocks equals packing from the codes and scales of the blocks."""
    stored = any_blocks(name, rows, blocks, seed, permuted)
    form = stored.format
    assert form.spec and form.table_rows
    by_rows = replace(stored, format=table_format(name, form.spec, form.parts, form.table_rows))
    assert packed_bytes(stored) == packed_bytes(by_rows)
    np.testing.assert_array_equal(
        embedded(stored).view(np.uint32), embedded(by_rows).view(np.uint32)
    )
    if form.spec.group == 16:  # every scale there is
        codes = np.arange(256, dtype=np.uint8).repeat(9).reshape(64, 1, 36)
        scales = StoredTensor("w", form, (64, 64), {"codes": codes})
        np.testing.assert_array_equal(embedded(scales), scales.dequantise())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", HALF_SCALED)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF])
def test_lookup_scale_that_is_not_finite(isa: str, name: str, bits: int) -> None:
    """Its row gives no finite results, and other rows do not change."""
    cols = 512
    good = random_stored(name, 33, cols, 0)
    codes = good.parts["codes"].copy()
    if name == "IQ1_M":
        for i in range(4):
            codes[20, 1, 49 + 2 * i] = codes[20, 1, 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4
    else:
        at = SCALE.get(name, 0)
        codes[20, -1, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
    bad = replace(good, parts={"codes": codes})
    x = np.random.default_rng(1).standard_normal((7, cols)).astype(np.float32)
    for offset in (False, True):
        want, got = product(isa, good, x, offset), product(isa, bad, x, offset)
        assert not np.isfinite(got[:, 20]).any()
        np.testing.assert_array_equal(np.delete(got, 20, 1), np.delete(want, 20, 1))


@pytest.mark.parametrize("name", GRIDS)
def test_lookup_weights_take_the_bytes_of_the_file(name: str) -> None:
    for rows, cols in ((16, 768), (64, 2048)):
        stored = random_stored(name, rows, cols, 0)
        assert stored.nbytes <= packed_bytes(stored) <= 1.02 * stored.nbytes


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_gate_and_up_are_packed_as_a_pair(isa: str, name: str) -> None:
    gate, up = random_stored(name, 40, 512, 1), random_stored(name, 40, 512, 2)
    assert np.array_equal(
        *(gated_unit(isa, gate, up, as_pair=as_pair) for as_pair in (False, True))
    )


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_codebook_is_required(name: str) -> None:
    form = FORMATS[name]
    assert form.integers
    codes, integers = random_stored(name, 16, 256, 0).parts["codes"], form.integers()
    plan = _native.Plan("", 1)
    for values in (
        None,
        integers[:-1].copy(),
        np.zeros((0, 8), np.int8),
        np.concatenate([integers, integers]),
    ):
        with pytest.raises(ValueError, match="comes with the"):
            plan.add_weight(name, 16, 256, codes, None, None, values)
    plan.add_weight(name, 16, 256, codes, None, None, integers)
    with pytest.raises(ValueError, match="none at all"):
        plan.add_weight("Q4_K", 16, 256, np.zeros(16 * 144, np.uint8), None, None, integers)


def test_lookup_grid_integers_do_not_overflow() -> None:
    plan, codes = _native.Plan("", 1), np.zeros(16 * 66, np.uint8)
    for value in (62, -62):
        plan.add_weight("IQ2_XXS", 16, 256, codes, None, None, np.full((256, 8), value, np.int8))
    for value in (63, -63, 127, -128):
        with pytest.raises(ValueError, match="62 at most"):
            plan.add_weight(
                "IQ2_XXS", 16, 256, codes, None, None, np.full((256, 8), value, np.int8)
            )


def test_lookup_blocks_of_another_kind_are_refused() -> None:
    plan = _native.Plan("", 1)
    ternary = plan.add_table(_native.TableSpec("2", 20, 512, 256, "f16", None))
    codes = random_stored("TQ2_0", 20, 512, 0).parts["codes"]
    plan.fill_table_blocks(ternary, "TQ2_0", codes, None)
    others = [
        plan.add_table(_native.TableSpec(*arguments))
        for arguments in (
            ("2", 20, 512, 32, "f16", None),
            ("2", 20, 512, 256, "f32", None),
            ("2", 20, 512, 256, "f16", "u8"),
        )
    ]
    order = np.arange(20)
    order[3] = 20
    for weight, name, data, rows in (
        *((other, "TQ2_0", codes, None) for other in others),
        *((ternary, name, codes, None) for name in ("TQ1_0", "IQ4_NL", "Q4_0", "F32", "")),
        *(
            (ternary, "TQ2_0", codes[:19], None),
            (ternary, "TQ2_0", codes, order),
            (9, "TQ2_0", codes, None),
            (-1, "TQ2_0", codes, None),
        ),
    ):
        with pytest.raises(ValueError):
            plan.fill_table_blocks(weight, name, data, rows)
