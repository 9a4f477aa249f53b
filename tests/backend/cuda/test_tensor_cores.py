"""Products with the bits of tensor cores: a row has the same ones in any step, on each GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.backend.cuda import architecture
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.quantise_rows import quantise_rows
from headrace.backend.cuda.packing import pack
from headrace.backend.cuda.workspace import Workspace
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.kv import round_bf16
from tests.backend.cuda.compiling import CHIPS
from tests.backend.cuda.examples import examples
from tests.backend.cuda.matrices import FORMAT_NAMES, random_matrix
from tests.backend.cuda.tensor_cores import (
    DOTS,
    MMA_NAMES,
    TensorCores,
    columns_of,
    cores_of,
    dot_of,
)
from tests.backend.stored import random_stored

pytest.importorskip("mmasim", reason="needs mmasim, of the extra oracle")
pytestmark = pytest.mark.skipif(not is_interpreting(), reason="a GPU has tensor cores of its own")

FEW = {
    "sm_80": ["F16", "Q8_0"],
    "sm_89": ["BF16"],
    "sm_90": ["BF16", "F16", "Q8_0", "Q4_K", "I8_MIXED"],
    "sm_100": ["Q4_0"],
    "sm_120": ["e4m3"],
}
WITHOUT = {"F32", "I8_ROW"}
"""Formats whose sums need no tensor cores, or are exact."""
PRODUCTS = [
    (chip, name)
    for chip in MMA_NAMES
    for name in (FEW[chip] if examples(1) == 1 else FORMAT_NAMES)
    if name not in WITHOUT
]
NUM_ROWS = 40


def use(monkeypatch: pytest.MonkeyPatch, cores: TensorCores) -> None:
    """Multiply in the interpreter as a GPU does, with the ranges of columns that it has."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_of(cores))
    monkeypatch.setattr(architecture, "_current", CHIPS[cores.chip]._replace(has_ptx=False))


def numbers(cols: int) -> NDArray[np.float32]:
    """Rows of very different sizes, with outliers: (40, cols)."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((NUM_ROWS, cols)) * np.exp2(rng.integers(-4, 4, (NUM_ROWS, 1)))
    return round_bf16(x.astype(np.float32))


def weight_of(name: str) -> StoredTensor:
    """A matrix with two ranges of columns, and one of 8-bit rows, which have a single one."""
    block = FORMATS[name].block if name in FORMATS else 32
    cols = 320 if name.startswith("I8") else 1056
    if name in FORMATS and block == 1:
        return random_stored(name, 24, cols, 1)
    return random_matrix(name, 24, -(-cols // block), 1)


def products(stored: StoredTensor, x: NDArray[np.float32], sizes: list[slice]) -> list[NDArray]:
    """Products of some rows at a time."""
    weight, outs = pack([stored]), []
    for rows in sizes:
        mine = torch.from_numpy(x[rows]).to(torch.bfloat16)
        quantised = None
        if weight.layout.rows_in_int8:
            codes = torch.empty(len(mine), weight.layout.padded_cols(stored.cols), dtype=torch.int8)
            quantised = codes, torch.empty(len(mine))
            quantise_rows(*quantised, mine, weight.layout.outliers)()
        out = torch.full((len(mine), stored.rows), torch.nan)
        linear(out, mine, weight, quantised=quantised, workspace=Workspace())()
        outs.append(out.numpy())
    return outs


@pytest.mark.parametrize(("chip", "name"), PRODUCTS)
def test_a_row_has_the_same_bits_in_any_step(
    chip: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, the error is at most one rounding to float32 in each column, and half of another."""
    use(monkeypatch, cores_of(chip, name))
    stored = weight_of(name)
    x = numbers(stored.cols)
    whole, one, some = products(stored, x, [slice(NUM_ROWS), slice(1), slice(3, 20)])
    assert np.array_equal(one, whole[:1])
    assert np.array_equal(some, whole[3:20])

    weight = stored.dequantise().astype(np.float64)
    if not name.startswith("I8"):
        weight = weight if name == "F16" else round_bf16(weight)
        size = np.abs(x) @ np.abs(weight.T)
        error = np.abs(whole - x.astype(np.float64) @ weight.T)
        assert np.all(error <= stored.cols * 2.0**-23 * size)
        assert error.any()


def test_an_order_that_follows_the_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with activations first on Hopper, with other instructions for few rows and for many."""

    class Mixed(TensorCores):
        def multiply(self, kind: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
            few = TensorCores(self.chip, "dot", 2)
            return (few if b.shape[1] <= 32 else super()).multiply(kind, a, b, c)

    use(monkeypatch, Mixed("sm_90", "warp_group_dot"))
    stored = weight_of("Q8_0")
    whole, some = products(stored, numbers(stored.cols), [slice(NUM_ROWS), slice(20)])
    assert (some != whole[:20]).mean() > 0.5


@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_both_instructions_of_hopper_sum_alike(kind: str) -> None:
    """Attention of decoding takes one, attention of prompts the other."""
    a, b, c = operands(kind)
    one, other = (TensorCores("sm_90", dot).multiply(kind, a, b, c) for dot in DOTS[:2])
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["bf16", "tf32"])
@pytest.mark.parametrize("chip", MMA_NAMES)
def test_another_order_of_columns_has_other_bits(chip: str, kind: str) -> None:
    """What the order of columns in a weight's products must not depend on: the rows of a step."""
    a, b, c = operands(kind)
    one, other = (TensorCores(chip, "dot", by).multiply(kind, a, b, c) for by in (1, 2))
    assert (one != other).float().mean() > 0.3
    assert torch.allclose(one, other, rtol=0, atol=1e-4)


def test_orders_of_columns() -> None:
    """Neighbouring registers go to different instructions."""
    assert columns_of(32, "bf16", 1).equal(torch.arange(32))
    first = [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29]
    assert columns_of(32, "bf16", 2).tolist() == [*first, *(column + 2 for column in first)]
    assert columns_of(16, "tf32", 2).tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    for by in (1, 2, 4):
        assert columns_of(128, "bf16", by).sort().values.equal(torch.arange(128))


def operands(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands of a product, and sums that it continues."""
    rng = torch.Generator().manual_seed(5)
    a, b = (torch.randn(shape, generator=rng) for shape in ((16, 256), (256, 16)))
    if kind == "bf16":
        a, b = a.bfloat16(), b.bfloat16()
    return a, b, torch.randn(16, 16, generator=rng)
