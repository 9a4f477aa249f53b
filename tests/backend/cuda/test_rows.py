"""Kernels over rows of numbers, held to the reference backend: norms, rotations, activations, sums,
and what moves numbers.
"""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels import elementwise, gather, rope, rope_angles
from headrace.backend.cuda.kernels.exit_choice import exit_choice
from headrace.backend.cuda.kernels.norm import norm
from headrace.backend.cuda.kernels.quantise_rows import quantise_rows
from headrace.backend.cuda.launch import Launch
from headrace.backend.reference.activations import activated, gated
from headrace.backend.reference.ops import rotate
from headrace.program.ops import Activation
from tests.backend.cuda.examples import examples
from tests.backend.stored import quantised_rows

BAD = [
    np.array([bits], np.uint32).view(np.float32)[0]
    for bits in (0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000)
]
"""NaN of both signs, and both infinities."""
ALONE = [a for a in get_args(Activation) if a != "clamped_swiglu"]
SEEDS = st.integers(0, 2**16)


def normal(rows: int, width: int, seed: int = 0, size: float = 1.0) -> Any:
    """Random numbers in a matrix whose rows lie a little apart."""
    x = np.random.default_rng(seed).standard_normal((rows, width + 4)) * size
    return torch.from_numpy(x.astype(np.float32)).to(DEVICE)[:, :width]


def nothing(rows: int, width: int, dtype: Any = torch.float32) -> Any:
    return torch.full((rows, width + 4), float("nan"), dtype=dtype, device=DEVICE)[:, :width]


def ran(launch: Launch, out: Any) -> NDArray[np.float32]:
    launch()
    return out.float().cpu().numpy()


def wide(x: Any) -> NDArray[np.float64]:
    return x.cpu().numpy().astype(np.float64)


def bits(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x).view(np.uint32)


def norm_twin(
    x: Any, weight: Any, bias: Any, eps: float, kind: str, size: int
) -> NDArray[np.float64]:
    rows = wide(x).reshape(len(x), -1, size)
    if kind == "layer":
        rows = rows - rows.mean(axis=2, keepdims=True)
    y = (
        rows
        / np.sqrt((rows * rows).mean(axis=2, keepdims=True) + eps)
        * wide(weight).reshape(-1, size)
    )
    return (y if bias is None else y + wide(bias).reshape(-1, size)).reshape(len(x), -1)


@settings(max_examples=examples(30), deadline=None)
@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([1, 5, 64, 129, 300]),
    groups=st.sampled_from([1, 3, 40]),
    kind=st.sampled_from(["rms", "layer"]),
    whole=st.booleans(),
    has_bias=st.booleans(),
    packed=st.booleans(),
    seed=SEEDS,
)
def test_norm(
    rows: int,
    size: int,
    groups: int,
    kind: Any,
    whole: bool,
    has_bias: bool,
    packed: bool,
    seed: int,
) -> None:
    width = size * groups
    x, out = (
        normal(rows, width, seed),
        nothing(rows, width, torch.bfloat16 if packed else torch.float32),
    )
    weight, bias = (normal(1, width if whole else size, seed + i)[0].contiguous() for i in (1, 2))
    got = ran(norm(out, x, weight, bias if has_bias else None, 1e-5, kind, size), out)
    want = norm_twin(x, weight, bias if has_bias else None, 1e-5, kind, size)
    assert np.allclose(got, want, rtol=2**-8 if packed else 2e-6, atol=0.02 if packed else 1e-5)


def test_a_wide_norm() -> None:
    x, weight, out = normal(2, 16384), normal(1, 16384, 1)[0], nothing(2, 16384)
    got = ran(norm(out, x, weight, None, 1e-6, "rms", 16384), out)
    assert np.allclose(got, norm_twin(x, weight, None, 1e-6, "rms", 16384), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [*BAD, np.float32(1e30)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_of_what_is_not_finite(bad: float, kind: Any) -> None:
    """Also where the sum of squares is too large. Of groups of columns, the one that it is in is
    spoilt.
    """
    x, weight, out = normal(2, 80), torch.ones(40, device=DEVICE), nothing(2, 80)
    x[1, 50] = float(bad)
    with np.errstate(invalid="ignore", over="ignore"):
        got = ran(norm(out, x, weight, None, 1e-5, kind, 40), out)
    assert (
        np.isfinite(got[0]).all()
        and np.isfinite(got[1, :40]).all()
        and not np.isfinite(got[1, 40:]).any()
    )


@settings(max_examples=examples(8), deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 33, 64, 500]),
    padding=st.sampled_from([0, 31]),
    packed=st.booleans(),
    seed=SEEDS,
)
def test_rows_to_int8(rows: int, width: int, padding: int, packed: bool, seed: int) -> None:
    x = normal(rows, width, seed)
    x[0] *= 1e-3
    x = x.to(torch.bfloat16) if packed else x
    codes = torch.full((rows, width + padding), 9, dtype=torch.int8, device=DEVICE)
    scales = torch.empty(rows, device=DEVICE)
    quantise_rows(codes, scales, x, False)()
    numbers = x.float().cpu().numpy()
    got = codes.cpu().numpy() * scales.cpu().numpy().astype(np.float64)[:, None]
    assert (
        np.array_equal(got[:, :width], quantised_rows(numbers, False, width))
        and not got[:, width:].any()
    )


@pytest.mark.parametrize("outliers", [False, True])
def test_rows_to_int8_with_outliers_and_without_codes(outliers: bool) -> None:
    x = normal(5, 70, 3)
    x[1, [3, 60]] = torch.tensor([6.5, -80.0], device=DEVICE)
    x[2] = 0
    x[3, 7] = float("inf")
    x[4] = -7
    codes, scales = (
        torch.empty(5, 70, dtype=torch.int8, device=DEVICE),
        torch.empty(5, device=DEVICE),
    )
    with np.errstate(invalid="ignore"):
        quantise_rows(codes, scales, x, outliers)()
    got, by = codes.cpu().numpy(), scales.cpu().numpy()
    kept = (
        np.where(np.abs(x.cpu().numpy()) > 6, 0, x.cpu().numpy()) if outliers else x.cpu().numpy()
    )
    for row in (0, 1, 2, 4):
        assert by[row] == np.abs(kept[row]).max() / np.float32(127)
        assert np.abs(got[row] * by[row] - kept[row]).max() <= by[row] * 0.5001
    assert np.isnan(by[3]) and not got[3].any() and not got[2].any()
    assert got[4].tolist() == [0 if outliers else -127] * 70


@settings(max_examples=examples(12), deadline=None)
@given(
    rows=st.integers(1, 9),
    pairs=st.sampled_from([1, 24, 64, 100]),
    scale=st.sampled_from([1.0, 1.35]),
    seed=SEEDS,
)
def test_angles(rows: int, pairs: int, scale: float, seed: int) -> None:
    """Those of positions up to a million are as good as those of the first."""
    positions = np.random.default_rng(seed).integers(0, 2**20, rows).astype(np.int32)
    positions[0] = 2**20
    frequencies = 10000.0 ** -(np.arange(pairs) / pairs)
    out = nothing(rows, 2 * pairs)
    launch = rope_angles.rope_angles(
        out, torch.from_numpy(positions).to(DEVICE), torch.from_numpy(frequencies).to(DEVICE), scale
    )
    angles = positions[:, None] * frequencies
    assert (
        np.abs(
            ran(launch, out) - scale * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        ).max()
        < 2e-7
    )


@settings(max_examples=examples(12), deadline=None)
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 9),
    sizes=st.sampled_from([(2, 1), (64, 32), (80, 20), (6, 2)]),
    seed=SEEDS,
)
def test_rope(rows: int, heads: int, sizes: tuple[int, int], seed: int) -> None:
    head_dim, pairs = sizes
    x, angles, out = (
        normal(rows, heads * head_dim, seed),
        normal(rows, 2 * pairs, seed + 1),
        nothing(rows, heads * head_dim),
    )
    assert np.allclose(
        ran(rope.rope(out, x, angles, head_dim), out),
        rotate(wide(x), wide(angles), head_dim),
        rtol=1e-6,
        atol=1e-6,
    )


def numbers(seed: int) -> Any:
    """Of all sizes, and of both signs."""
    x = np.concatenate(
        [
            np.random.default_rng(seed).standard_normal(900) * 3,
            *(10.0 ** np.arange(-30, 31) * s for s in (-1, 1)),
            [0, 20, -12],
        ]
    )
    return torch.from_numpy(x[None].astype(np.float32)).to(DEVICE)


def nearly(
    got: NDArray[np.float32], want: NDArray[np.float64], x: NDArray[np.float64], share: float = 2e-6
) -> bool:
    """Close to `want` for its size, but where an activation leaves next to nothing of x."""
    return bool(
        (np.abs(got - want) <= share * np.abs(want) + 1e-12 * np.abs(x).clip(None, 1e3)).all()
    )


@pytest.mark.parametrize("activation", ALONE)
def test_activations(activation: Any) -> None:
    x = numbers(0)
    out = nothing(*x.shape)
    with np.errstate(over="ignore"):
        got, want = (
            ran(elementwise.activate(out, x, activation), out),
            activated(wide(x), activation),
        )
    assert nearly(got, want, wide(x))


@pytest.mark.parametrize("activation", get_args(Activation))
@settings(max_examples=examples(12), deadline=None)
@given(
    rows=st.integers(1, 5), width=st.sampled_from([1, 63, 700]), packed=st.booleans(), seed=SEEDS
)
def test_gated_units(activation: Any, rows: int, width: int, packed: bool, seed: int) -> None:
    """Gate and up lie side by side, as one product with both of their weights leaves them."""
    both, out = (
        normal(rows, 2 * width, seed, 4),
        nothing(rows, width, torch.bfloat16 if packed else torch.float32),
    )
    got = ran(elementwise.glu(out, both[:, :width], both[:, width:], activation), out)
    gate, up = wide(both[:, :width]), wide(both[:, width:])
    assert nearly(
        got, gated(gate, up, activation), gate * (np.abs(up) + 1), 2**-8 if packed else 2e-6
    )


@pytest.mark.parametrize("packed", [False, True])
def test_thresholds(packed: bool) -> None:
    """Numbers of the threshold's magnitude become 0, and larger ones stay as they are."""
    x = normal(3, 700, 5)
    x[0, :4] = torch.tensor([0.5, -0.5, 0.75, -0.75])
    out = nothing(3, 700, torch.bfloat16 if packed else torch.float32)
    got = ran(elementwise.threshold(out, x, 0.5), out)
    want = np.where(np.abs(wide(x)) > 0.5, wide(x), 0)
    assert nearly(got, want, wide(x), 2**-8 if packed else 0)
    assert got[0, :4].tolist() == [0, 0, 0.75, -0.75]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x, y = normal(2, 70), normal(2, 70, 1)
    x[1, 5] = float(bad)
    launches: dict[str, Callable[[Any], Launch]] = {
        a: lambda out, a=a: elementwise.activate(out, x, a) for a in ALONE
    }  # type: ignore[misc]
    launches |= {
        f"glu {a}": lambda out, a=a: elementwise.glu(out, x, y, a) for a in get_args(Activation)
    }  # type: ignore[misc]
    launches |= {
        "up": lambda out: elementwise.glu(out, y, x, "clamped_swiglu"),
        "scale": lambda out: elementwise.scale(out, x, 0.0),
        "soft_cap": lambda out: elementwise.soft_cap(out, x, 30.0),
        "add": lambda out: elementwise.add(out, x, y),
        "threshold": lambda out: elementwise.threshold(out, x, 0.0),
        "gate_rows": lambda out: elementwise.gate_rows(out, y, x[:, 5:]),
    }
    for name, launch in launches.items():
        out = nothing(2, 70)
        with np.errstate(invalid="ignore", over="ignore"):
            got = ran(launch(out), out)
        assert np.isfinite(got[0]).all() and not np.isfinite(got[1, 5]), name


@settings(max_examples=examples(12), deadline=None)
@given(rows=st.integers(1, 5), width=st.sampled_from([1, 63, 700]), seed=SEEDS)
def test_sums_factors_and_gates(rows: int, width: int, seed: int) -> None:
    x, y, gate, out = (
        normal(rows, width, seed),
        normal(rows, width, seed + 1),
        normal(rows, 1, seed + 2, 4),
        nothing(rows, width),
    )
    assert np.array_equal(ran(elementwise.add(out, x, y), out), (x + y).cpu().numpy())
    assert np.allclose(ran(elementwise.scale(out, x, 0.3), out), 0.3 * wide(x), rtol=2e-7)
    assert np.allclose(
        ran(elementwise.gate_rows(out, x, gate), out),
        wide(x) / (1 + np.exp(-wide(gate))),
        rtol=1e-6,
    )


@pytest.mark.parametrize("width", [3, 40, 5000])
@pytest.mark.parametrize("has_late", [True, False])
def test_exit_choice(width: int, has_late: bool) -> None:
    """Clear rows are early; unclear rows, and rows that are not finite, are late or NaN."""
    early, late = normal(9, width), normal(9, width, seed=1)
    early[1, 1] = early[1].max() + 9  # clear
    early[2, :2] = 50.0  # a tie
    early[3, width - 1] = 60.0  # clear in the last column
    early[4, 0], early[5, width - 1] = float("nan"), float("inf")
    found = ran(exit_choice(out := nothing(9, width), early, late if has_late else None, 0.9), out)
    leaves = np.array([False, True, False, True] + [False] * 5)
    stays = wide(late) if has_late else np.full((9, width), np.nan)
    np.testing.assert_array_equal(found, np.where(leaves[:, None], wide(early), stays))


def test_soft_cap() -> None:
    x = numbers(1)
    out = nothing(*x.shape)
    for cap in (2.0, 30.0):
        assert nearly(
            ran(elementwise.soft_cap(out, x, cap), out), cap * np.tanh(wide(x) / cap), wide(x), 1e-6
        )


@settings(max_examples=examples(12), deadline=None)
@given(
    rows=st.integers(1, 7),
    width=st.sampled_from([1, 65, 700]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=SEEDS,
)
def test_gathered_rows(rows: int, width: int, dtype: Any, seed: int) -> None:
    x, out = normal(5, width, seed).to(dtype), nothing(rows, width, dtype)
    index = np.random.default_rng(seed).integers(0, 5, rows).astype(np.int32)
    assert np.array_equal(
        ran(gather.gather_rows(out, x, torch.from_numpy(index).to(DEVICE)), out),
        x.float().cpu().numpy()[index],
    )


@pytest.mark.parametrize("shared", [(False, False), (False, True), (True, False)])
def test_heads_side_by_side(shared: tuple[bool, bool]) -> None:
    dims = (5, 3)
    x, y = (
        normal(3, dim * (1 if one else 4), i)
        for i, (dim, one) in enumerate(zip(dims, shared, strict=True))
    )
    out = nothing(3, 4 * 8)
    parts = [
        np.broadcast_to(v.cpu().numpy().reshape(3, -1, dim), (3, 4, dim))
        for v, dim in zip((x, y), dims, strict=True)
    ]
    got = ran(gather.concat_heads(out, x, y, 4, *dims), out)
    assert np.array_equal(got.reshape(3, 4, 8), np.concatenate(parts, axis=2))


@settings(max_examples=examples(4), deadline=None)
@given(width=st.sampled_from([48, 330]), rows=st.integers(2, 40), seed=SEEDS)
def test_a_row_alone_has_the_bits_that_it_has_among_others(
    width: int, rows: int, seed: int
) -> None:
    x, at = normal(rows, width, seed), seed % rows
    weight, angles = normal(1, width, 1)[0], normal(rows, 12, 2)
    ones: list[Callable[[Any, slice], Launch]] = [
        lambda out, r: norm(out, x[r], weight, weight, 1e-5, "layer", width),
        lambda out, r: norm(out, x[r], weight, None, 1e-5, "rms", 6),
        lambda out, r: rope.rope(out, x[r], angles[r], 24 if width == 48 else 33),
        lambda out, r: elementwise.glu(out, x[r], x[r], "gelu"),
        lambda out, r: elementwise.activate(out, x[r], "silu"),
        lambda out, r: elementwise.soft_cap(out, x[r], 2.0),
        lambda out, r: elementwise.gate_rows(out, x[r], x[r]),
    ]
    for one in ones:
        all_rows, alone = nothing(rows, width), nothing(1, width)
        among = ran(one(all_rows, slice(None)), all_rows)
        assert np.array_equal(
            bits(ran(one(alone, slice(at, at + 1)), alone)), bits(among[at : at + 1])
        )
