"""Ops that read part of a matrix have the bits of those that read it whole, in every format."""

import numpy as np
import pytest

from headrace import _native
from headrace.backend.cpu.packing import add_weight, add_weight_pair
from headrace.quant.formats import StoredTensor
from tests.backend.stored import random_stored
from tests.backend.test_cpu_linear import run_rows
from tests.backend.test_table_formats import Array
from tests.tables import random_table

ISAS = _native.isas()
BLOCKS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_0", "F32")
TABLES = ("int4", "int4-point", "int8")
"""Formats with copies, and some without: these are read whole."""


def stored_of(kind: str, rows: int, cols: int, seed: int) -> StoredTensor:
    if kind in BLOCKS:
        return random_stored(kind, rows, cols, seed)
    return random_table(kind, rows, cols, seed, f"w{seed}")


def gated(isa: str, kind: str, x: Array, skips: bool, zeros: float) -> Array:
    """relu(x @ gate.T + bias) * (x @ up.T + bias), [rows, 72], with a share of zeros."""
    gate, up = stored_of(kind, 72, x.shape[1], 1), stored_of(kind, 72, x.shape[1], 2)
    plan = _native.Plan(isa, 2)
    loose, packed = (plan.add_buffer(x.shape[1], "step", packs) for packs in (False, True))
    out = plan.add_buffer(72, "step", False)
    plan.embed(loose, plan.add_weight("F32", *x.shape, x.view(np.uint8).reshape(-1), None))
    plan.pack(packed, loose)
    gates = x @ gate.dequantise().T
    biases = [np.full(72, bias, np.float32) for bias in (-np.quantile(gates, zeros), 0.3)]
    plan.glu_linear(
        out,
        packed,
        *add_weight_pair(plan, gate, up),
        *(plan.add_vector(bias) for bias in biases),
        "relu",
        skips,
    )
    run_rows(plan, len(x))
    return np.array(plan.floats(out, len(x)))


def columns(isa: str, kind: str, x: Array, skips: bool) -> Array:
    """x @ W.T, [rows, 200]."""
    plan = _native.Plan(isa, 2)
    loose, packed = (plan.add_buffer(x.shape[1], "step", packs) for packs in (False, True))
    out = plan.add_buffer(200, "step", False)
    plan.embed(loose, plan.add_weight("F32", *x.shape, x.view(np.uint8).reshape(-1), None))
    plan.pack(packed, loose)
    weight = add_weight(plan, stored_of(kind, 200, x.shape[1], 3))
    if skips:
        plan.sparse_linear(out, packed, weight, -1, -1)
    else:
        plan.linear(out, packed, weight, -1, -1, False)
    run_rows(plan, len(x))
    return np.array(plan.floats(out, len(x)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BLOCKS + TABLES)
@pytest.mark.parametrize(("cols", "zeros"), [(256, 0.9), (1280, 0.5)])
def test_unread_rows_and_columns_change_no_bit(
    isa: str, kind: str, cols: int, zeros: float
) -> None:
    """In steps of few rows, which read a part, and of many; with whole vectors of groups or not."""
    rng = np.random.default_rng(cols)
    for rows in (1, 2, 3):
        x = rng.standard_normal((rows, cols)).astype(np.float32)
        want = gated(isa, kind, x, False, zeros)
        assert np.array_equal(gated(isa, kind, x, True, zeros), want)
        assert (want != 0).mean() == pytest.approx(1 - zeros, abs=0.12)
        x *= rng.random(cols) > zeros
        assert np.array_equal(columns(isa, kind, x, True), columns(isa, kind, x, False))
