"""The noise of sampling on the device: Philox to the bit, Gumbel variates in both
precisions.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels import sample_table as table
from headrace.backend.cuda.kernels.sample_noise import (
    gumbel,
    gumbel_in_float32,
    word_of,
    words_of_tile,
)
from headrace.backend.cuda.sampling_layout import COLUMNS
from tests.backend.cuda.examples import examples

WORDS = st.integers(0, 2**32 - 1)


@triton.jit
def words_kernel(fields, first, of_tile, of_ids, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(of_tile + lanes, words_of_tile(first, fields, BLOCK).to(tl.int32, bitcast=True))
    tl.store(of_ids + lanes, word_of(first + lanes, fields).to(tl.int32, bitcast=True))


@triton.jit
def gumbel_kernel(words, wide, narrow, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    word = tl.load(words + lanes).to(tl.uint32, bitcast=True)
    tl.store(wide + lanes, gumbel(word))
    tl.store(narrow + lanes, gumbel_in_float32(word))


def _zeros(size: int, kind: Any) -> torch.Tensor:
    return torch.zeros(size, dtype=kind, device=DEVICE)


@settings(max_examples=examples(10), deadline=None)
@given(
    position=WORDS,
    seq_index=WORDS,
    low=WORDS,
    high=WORDS,
    first=st.integers(0, 2**22).map(lambda quads: 4 * quads),
)
@example(position=0xFFFFFFFF, seq_index=0xFFFFFFFF, low=0xFFFFFFFF, high=0xFFFFFFFF, first=0)
def test_philox_words_equal_the_native_generator(
    position: int, seq_index: int, low: int, high: int, first: int
) -> None:
    row = np.zeros(COLUMNS, np.uint32)
    for column, word in (
        (table.POSITION, position),
        (table.SEQ_INDEX, seq_index),
        (table.SEED_LOW, low),
        (table.SEED_HIGH, high),
    ):
        row[column.value] = word
    of_tile, of_ids = _zeros(16, torch.int32), _zeros(16, torch.int32)
    words_kernel[(1,)](
        torch.from_numpy(row.view(np.int32)).to(DEVICE), first, of_tile, of_ids, BLOCK=16
    )
    expected = [
        word
        for quad in range(4)
        for word in _native.philox((first // 4 + quad, position, seq_index, 0), (low, high))
    ]
    assert of_tile.cpu().numpy().view(np.uint32).tolist() == expected
    assert of_ids.cpu().numpy().view(np.uint32).tolist() == expected


def test_gumbel_variates() -> None:
    """The smallest and largest words, the words at the switch to the series, and random
    words.
    """
    edges = [0, 1, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 2**28, 2**32 - 2**28 - 1, 2**32 - 2**28 + 1]
    words = np.concatenate([edges, np.random.default_rng(0).integers(0, 2**32, 1016)]).astype(
        np.uint32
    )
    wide, narrow = _zeros(1024, torch.float64), _zeros(1024, torch.float32)
    gumbel_kernel[(1,)](torch.from_numpy(words.view(np.int32)).to(DEVICE), wide, narrow, BLOCK=1024)
    expected = -np.log(-np.log((words.astype(np.float64) + 0.5) * 2.0**-32))
    np.testing.assert_allclose(wide.cpu().numpy(), expected, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(narrow.cpu().numpy(), expected, rtol=0, atol=1e-5)
