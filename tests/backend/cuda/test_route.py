"""Experts on a GPU: which of them a row goes to, the rows of each in tiles, and what comes of its
choices summed up.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels import align_experts as align
from headrace.backend.cuda.kernels.route import route
from headrace.backend.reference import executable as reference
from headrace.config import KvConfig
from tests.backend.cuda.examples import examples
from tests.backend.test_experts import ROUTINGS, outputs, random_rows
from tests.moe import MoeModel

Floats = NDArray[np.float32]


def routed(moe_model: MoeModel, x: Floats) -> Floats:
    logits = torch.from_numpy(x).to(DEVICE)
    bias = torch.from_numpy(
        moe_model.tensors["router.bias"].dequantise().reshape(-1).astype(np.float32)
    ).to(DEVICE)
    out = torch.full((len(x), 2 * moe_model.top_k), -7.0, device=DEVICE)
    has_bias = bias if moe_model.has_route_bias else None
    route(
        out,
        logits,
        has_bias,
        moe_model.top_k,
        moe_model.scoring,
        moe_model.normalised,
        moe_model.factor,
        *moe_model.groups,
    )()
    return out.cpu().numpy()


@settings(max_examples=examples(30), deadline=None)
@given(options=ROUTINGS, step=st.sampled_from([0.0, 0.5, 40.0]), seed=st.integers(0, 2**16))
def test_rows_are_routed_as_the_reference_says(
    options: dict[str, Any], step: float, seed: int
) -> None:
    """Also where logits are equal, or so large that scores are."""
    options = dict(options)
    experts, top_k, groups = options.pop("sizes")
    moe_model = MoeModel(experts, top_k, groups=groups, **options)
    x = random_rows(4, experts, seed, step)
    got, want = (
        routed(moe_model, x),
        outputs(reference.compile(*moe_model.routing(), KvConfig(()), 1), x),
    )
    assert np.array_equal(got[:, :top_k], want[:, :top_k])
    assert np.allclose(got[:, top_k:], want[:, top_k:], rtol=1e-6, atol=1e-30)
    assert np.array_equal(routed(moe_model, x[2:3]), got[2:3])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_equal_scores_go_to_the_lower_numbers(scoring: Any) -> None:
    x = np.zeros((2, 8), np.float32)
    x[1, [3, 6, 7]] = 1
    for groups in ((1, 1), (4, 2)):
        got = routed(MoeModel(scoring=scoring, top_k=4, groups=groups), x)
        assert got[0].tolist() == [0, 1, 2, 3, 0.25, 0.25, 0.25, 0.25]
        assert got[1, :3].tolist() == [3, 6, 7]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_a_row_that_cannot_choose_goes_to_the_first_experts(
    scoring: Any, groups: tuple[int, int]
) -> None:
    x = random_rows(4, 8, 5)
    x[1:, 6] = -np.inf, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        got = routed(MoeModel(top_k=3, scoring=scoring, groups=groups), x)
    assert (
        got[1:, :3].tolist() == [[0, 1, 2]] * 3
        and np.isnan(got[1:, 3:]).all()
        and np.isfinite(got[0]).all()
    )


def test_many_experts() -> None:
    moe_model = MoeModel(512, 22, 512, 1, scoring="sigmoid", groups=(8, 4))
    x = random_rows(3, 512, 1)
    got, want = (
        routed(moe_model, x),
        outputs(reference.compile(*moe_model.routing(), KvConfig(()), 1), x),
    )
    assert np.array_equal(got[:, :22], want[:, :22]) and np.allclose(
        got[:, 22:], want[:, 22:], rtol=1e-6
    )


def whole(values: Any) -> NDArray[np.int64]:
    return values.cpu().numpy().astype(np.int64)


def random_routing(rows: int, top_k: int, experts: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet(np.full(experts, 0.3)) + 1e-9
    chosen = np.stack(
        [rng.choice(experts, top_k, replace=False, p=chances / chances.sum()) for _ in range(rows)]
    )
    return np.concatenate([chosen, rng.standard_normal((rows, top_k))], axis=1).astype(np.float32)


def expected_tiles(
    experts: NDArray[np.int64], numbers: range, block_m: int
) -> tuple[list[list[int]], list[int]]:
    """The pairs in each tile, and its expert."""
    tiles, of = [], []
    for number in numbers:
        pairs = np.flatnonzero(experts == number).tolist()
        for first in range(0, len(pairs), block_m):
            some = pairs[first : first + block_m]
            tiles.append(some + [align.NONE] * (block_m - len(some)))
            of.append(number)
    return tiles, of


def check_aligned(to: align.Aligned, tiles: list[list[int]], of: list[int]) -> None:
    assert whole(to.num_tiles).tolist() == [len(tiles)] and len(tiles) <= to.most_tiles
    assert whole(to.experts)[: len(of)].tolist() == of
    assert whole(to.pairs).reshape(-1, to.block_m)[: len(tiles)].tolist() == tiles


@settings(max_examples=examples(12), deadline=None)
@given(
    rows=st.sampled_from([1, 2, 9, 40]),
    sizes=st.sampled_from([(1, 1), (5, 2), (16, 4), (40, 8)]),
    block_m=st.sampled_from([1, 4, 16]),
    padding=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**16),
)
def test_pairs_lie_by_expert(
    rows: int, sizes: tuple[int, int], block_m: int, padding: int, seed: int
) -> None:
    experts, top_k = sizes
    routing = random_routing(rows + padding, top_k, experts, seed)
    to = align.empty_aligned(rows + padding, top_k, experts, block_m, DEVICE)
    to.pairs.fill_(99), to.experts.fill_(99)
    loads, num_rows = (
        torch.arange(experts, device=DEVICE),
        torch.tensor([rows], dtype=torch.int32, device=DEVICE),
    )
    for launch in align.align_experts(to, torch.from_numpy(routing).to(DEVICE), num_rows, loads):
        launch()
    chosen = routing[:rows, :top_k].astype(np.int64).reshape(-1)
    check_aligned(to, *expected_tiles(chosen, range(experts), block_m))
    assert np.array_equal(whole(loads), np.arange(experts) + np.bincount(chosen, minlength=experts))


def test_more_pairs_than_one_program_counts() -> None:
    experts, top_k, rows = 20, 3, 900
    routing = random_routing(rows, top_k, experts, 0)
    to = align.empty_aligned(rows, top_k, experts, 64, DEVICE)
    loads, num_rows = (
        torch.zeros(experts, dtype=torch.int64, device=DEVICE),
        torch.tensor([850], dtype=torch.int32, device=DEVICE),
    )
    launches = align.align_experts(to, torch.from_numpy(routing).to(DEVICE), num_rows, loads)
    assert len(launches) == 2
    for _ in range(2):
        for launch in launches:
            launch()
    chosen = routing[:850, :top_k].astype(np.int64).reshape(-1)
    check_aligned(to, *expected_tiles(chosen, range(experts), 64))
    assert np.array_equal(whole(loads), 2 * np.bincount(chosen, minlength=experts))


@settings(max_examples=examples(6), deadline=None)
@given(rows=st.sampled_from([1, 7, 50]), slots=st.sampled_from([1, 5]), seed=st.integers(0, 2**16))
def test_rows_lie_by_adapter(rows: int, slots: int, seed: int) -> None:
    adapters = np.random.default_rng(seed).integers(-1, slots, rows + 2).astype(np.int32)
    to = align.empty_aligned(rows + 2, 1, slots + 1, 16, DEVICE)
    num_rows = torch.tensor([rows], dtype=torch.int32, device=DEVICE)
    for launch in align.align_adapters(to, torch.from_numpy(adapters).to(DEVICE), slots, num_rows):
        launch()
    check_aligned(to, *expected_tiles(adapters[:rows].astype(np.int64), range(-1, slots), 16))


@settings(max_examples=examples(6), deadline=None)
@given(
    rows=st.integers(1, 6),
    top_k=st.integers(1, 5),
    width=st.sampled_from([3, 64, 600]),
    seed=st.integers(0, 2**16),
)
def test_choices_are_summed_up_in_their_order(rows: int, top_k: int, width: int, seed: int) -> None:
    routing = random_routing(rows, top_k, 8, seed)
    y, out = random_rows(rows * top_k, width, seed), torch.empty(rows, width, device=DEVICE)
    align.combine(out, torch.from_numpy(y).to(DEVICE), torch.from_numpy(routing).to(DEVICE))()
    want = np.zeros((rows, width), np.float32)
    for k in range(top_k):
        want += routing[:, top_k + k, None] * y.reshape(rows, top_k, width)[:, k]
    assert np.array_equal(out.cpu().numpy(), want)
