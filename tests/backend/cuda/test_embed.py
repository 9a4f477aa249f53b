"""Rows of embedding tables in every format: bit for bit what the format means."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels.embed import embed, embed_position
from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.packing import pack
from headrace.quant.formats import FORMATS
from tests.backend.cuda.examples import examples
from tests.backend.cuda.matrices import FORMAT_NAMES, random_matrix


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=examples(2), deadline=None)
@given(blocks=st.integers(1, 3), rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_rows_are_what_their_format_means(name: str, blocks: int, rows: int, seed: int) -> None:
    stored = random_matrix(name, rows, blocks, seed)
    rng = np.random.default_rng(seed)
    drawn, tokens = rng.integers(0, rows, 3), rng.integers(0, rows, 5)
    source = np.array([-1, 2, -1, 0, 1])
    out = torch.full((5, stored.cols), torch.nan, device=DEVICE)
    embed(
        out,
        pack([stored]),
        *(torch.tensor(a, dtype=torch.int32, device=DEVICE) for a in (tokens, source, drawn)),
    )()
    want = stored.dequantise_rows(np.where(source < 0, tokens, drawn[source]))
    if "MXFP4" in name or name.startswith(
        "IQ"
    ):  # a scale and a code are multiplied in another order
        assert np.allclose(out.cpu().numpy(), want, rtol=1e-6, atol=0)
    else:
        assert np.array_equal(out.cpu().numpy(), want)


def test_positions_beyond_the_last_are_that() -> None:
    stored = random_matrix("F32", 4, 1, 0)
    out = torch.empty(3, stored.cols, device=DEVICE)
    embed_position(out, pack([stored]), torch.tensor([3, 1, 9], dtype=torch.int32, device=DEVICE))()
    assert np.array_equal(out.cpu().numpy(), stored.dequantise_rows([3, 1, 3]))


def test_all_stored_formats_are_tried() -> None:
    assert set(FORMAT_NAMES) >= set(FORMATS)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_bytes_are_those_that_were_counted(name: str) -> None:
    stored = random_matrix(name, 6, 3, 1)
    weight = pack([stored])
    tensors = (weight.codes, weight.scales, weight.zeros, weight.lookup, weight.places)
    assert layout_of(stored).nbytes(6, stored.cols) == sum(
        tensor.nbytes for tensor in tensors if tensor is not None
    )
