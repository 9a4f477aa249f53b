"""What adapters add to products on a GPU, held to what they are, and to themselves among other rows
and other adapters.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kernels.align_experts import align_adapters, empty_aligned
from headrace.backend.cuda.kernels.lora import BLOCK_M, hidden_shape, lora, stored, table_row
from headrace.program.adapter import LowRank
from headrace.quant.kv import round_bf16
from tests.backend.cuda.examples import examples

Floats = NDArray[np.float32]
Matrices = Sequence[LowRank | None]
NONE = None
"""In place of matrices: the adapter has none for the weight."""


def low_rank(rank: int, cols: int, width: int, seed: int) -> LowRank:
    rng = np.random.default_rng(seed)
    down, up = (
        round_bf16(rng.standard_normal(shape).astype(np.float32))
        for shape in ((rank, cols), (width, rank))
    )
    return LowRank(down.astype(np.float32), up.astype(np.float32), float(rng.uniform(0.1, 2)))


def added(
    x: Any,
    adapters: list[int],
    matrices: Matrices,
    width: int,
    max_rank: int = 0,
    num_rows: int | None = None,
) -> Floats:
    slots = len(matrices)
    kept = [stored(each, DEVICE) if each else NONE for each in matrices]
    rows = [
        table_row(*of, each.scale) if each and of else [0] * 4
        for of, each in zip(kept, matrices, strict=True)
    ]
    to = empty_aligned(len(x), 1, slots + 1, BLOCK_M, DEVICE)
    max_rank = max_rank or max(len(each.down) if each else 1 for each in matrices)
    hidden = torch.full(hidden_shape(to, x.shape[1], max_rank), float("nan"), device=DEVICE)
    delta = torch.full((len(x), width), 77.0, device=DEVICE)
    count = torch.tensor(
        [len(x) if num_rows is None else num_rows], dtype=torch.int32, device=DEVICE
    )
    table = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
    numbers = torch.tensor(adapters, dtype=torch.int32, device=DEVICE)
    for launch in (*align_adapters(to, numbers, slots, count), *lora(delta, hidden, x, to, table)):
        launch()
    return delta.cpu().numpy()


def expected(
    x: Any, adapters: list[int], matrices: Matrices, width: int, sizes: bool = False
) -> NDArray[np.float64]:
    """What is added; of `sizes`, the sum of the magnitudes that make it up."""
    delta, of = np.zeros((len(x), width)), np.abs if sizes else np.asarray
    for row, number in enumerate(adapters):
        if number >= 0 and (each := matrices[number]):
            delta[row] = each.scale * (
                of(x[row].double().cpu().numpy())
                @ of(each.down.T.astype(np.float64))
                @ of(each.up.T)
            )
    return delta


def near(got: Floats, x: Any, adapters: list[int], matrices: Matrices, width: int) -> bool:
    """Close to what is added, for the magnitudes that it is the sum of.

    The interpreter rounds a sum once, and a GPU after each addition.
    """
    error = np.abs(got - expected(x, adapters, matrices, width))
    terms = x.shape[1] + max((len(each.down) for each in matrices if each), default=0)
    gap = 5e-7 if is_interpreting() else 2**-24 * terms
    return bool((error <= gap * expected(x, adapters, matrices, width, sizes=True)).all())


def rows_of(rows: int, cols: int, dtype: Any, seed: int) -> Any:
    x = np.random.default_rng(seed).standard_normal((rows, cols + 8)).astype(np.float32)
    return torch.from_numpy(x).to(DEVICE, dtype)[:, :cols]


@settings(max_examples=examples(10), deadline=None)
@given(
    rows=st.sampled_from([1, 5, 23]),
    ranks=st.lists(st.sampled_from([0, 1, 8, 16, 40]), min_size=1, max_size=3),
    shape=st.sampled_from([(24, 33), (64, 128), (300, 150)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_deltas(rows: int, ranks: list[int], shape: tuple[int, int], dtype: Any, seed: int) -> None:
    cols, width = shape
    adapters = np.random.default_rng(seed).integers(-1, len(ranks), rows).tolist()
    matrices = [
        low_rank(rank, cols, width, seed + i) if rank else NONE for i, rank in enumerate(ranks)
    ]
    x = rows_of(rows, cols, dtype, seed)
    assert near(added(x, adapters, matrices, width), x, adapters, matrices, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_its_bits_whatever_is_beside_it(dtype: Any) -> None:
    """Other rows, other adapters with a higher rank, padding, and more columns than one program
    sums up.
    """
    cols, width = 1100, 40
    matrices = [
        low_rank(8, cols, width, 0),
        low_rank(70, cols, width, 1),
        NONE,
        low_rank(16, cols, width, 2),
    ]
    adapters = [0, 0, 1, -1, 3, 2, 0, 3, *[0] * 12, 1]
    x = rows_of(len(adapters), cols, dtype, 3)
    among = added(x, adapters, matrices, width, num_rows=len(adapters))
    assert near(among, x, adapters, matrices, width)
    for row in (0, 4, 20):
        number = adapters[row]
        alone = added(x[row : row + 1], [0], [matrices[number]], width)
        assert np.array_equal(alone.view(np.uint32), among[row : row + 1].view(np.uint32))
    some = added(x[4:9], adapters[4:9], matrices, width, max_rank=200, num_rows=4)
    assert np.array_equal(some[:4], among[4:8]) and (some[4] == 77).all()
    assert not among[[3, 5]].any()


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, matrices = rows_of(4, 64, torch.float32, 0), [low_rank(8, 64, 20, 1)]
    good = added(x, [0] * 4, matrices, 20)
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoilt = x.clone()
        spoilt[2, 40] = bad
        with np.errstate(invalid="ignore"):
            got = added(spoilt, [0] * 4, matrices, 20)
        assert not np.isfinite(got[2]).any() and np.array_equal(got[[0, 1, 3]], good[[0, 1, 3]])


def test_float32_is_multiplied_as_such() -> None:
    """Numbers whose low bits bf16 would lose."""
    matrices = [LowRank(np.ones((1, 32), np.float32), np.ones((1, 1), np.float32), 1.0)]
    x = torch.zeros(1, 32, device=DEVICE)
    x[0, :2] = torch.tensor([1 + 2.0**-22, -1.0], device=DEVICE)
    assert added(x, [0], matrices, 1).tolist() == [[2.0**-22]]
