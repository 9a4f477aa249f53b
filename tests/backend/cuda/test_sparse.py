"""2:4 weights on a GPU: the bits of the dense matrix, from fewer bytes."""

import numpy as np
import pytest
import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels.embed import embed_position
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.quantise_rows import quantise_rows
from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.packing import PackedWeight, pack
from headrace.quant.formats import StoredTensor
from tests.backend.test_sparse_weights import dense, random_rows
from tests.tables import SPARSE_KINDS, random_table


def product(stored: StoredTensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    weight = pack([stored])
    x = torch.from_numpy(random_rows(num_rows, stored.cols)).to(DEVICE, dtype)
    out = torch.full((num_rows, stored.rows), torch.nan, device=DEVICE)
    linear(out, x, weight, quantised=_in_int8(x, weight))()
    return out


def _in_int8(x: torch.Tensor, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not weight.layout.rows_in_int8:
        return None
    width = weight.layout.padded_cols(x.shape[1])
    codes = torch.empty(len(x), width, dtype=torch.int8, device=DEVICE)
    scales = torch.empty(len(x), device=DEVICE)
    quantise_rows(codes, scales, x, weight.layout.outliers)()
    return codes, scales


@pytest.mark.parametrize("kind", SPARSE_KINDS)
@pytest.mark.parametrize("cols", [256, 84])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sparse_products_have_the_bits_of_dense_ones(
    kind: str, cols: int, dtype: torch.dtype
) -> None:
    stored = random_table(kind, 42, cols, 1)
    for num_rows in (1, 20):
        found = product(stored, num_rows, dtype)
        assert found.any() and torch.equal(found, product(dense(stored), num_rows, dtype))


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_sparse_embeddings_are_exact(kind: str) -> None:
    stored = random_table(kind, 12, 196, 2)
    out = torch.full((12, 196), torch.nan, device=DEVICE)
    rows = torch.arange(12, dtype=torch.int32, device=DEVICE)
    embed_position(out, pack([stored]), rows)()
    assert np.array_equal(out.cpu().numpy(), stored.dequantise())


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_sparse_bytes(kind: str) -> None:
    """A matrix takes the bits of kept codes and of their places, and its scales."""
    stored = random_table(kind, 32, 512, 3)
    spec, layout = SPARSE_KINDS[kind], layout_of(stored)
    code_bytes = 32 * 512 * (spec.bits // 2 + 1) // 8
    tables = layout.table_words(layout.scale, 512) if layout.scale else 0
    assert layout.nbytes(32, 512) == code_bytes + 32 * 4 * tables
    weight = pack([stored])
    parts = (weight.codes, weight.scales, weight.places)
    assert layout.nbytes(32, 512) == sum(part.nbytes for part in parts if part is not None)
