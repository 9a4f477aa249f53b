"""Number formats of keys and values."""

import numpy as np
import pytest

from headrace.backend_traits import KvDtype
from headrace.program.kv import KvGroup, KvLayout, number_bytes
from headrace.quant.kv import block_bytes, hadamard, round_bf16, round_trip


def test_kv_block_bytes() -> None:
    """A head of 64 has two bytes a number, or one or a half next to four bf16 numbers
    for key and value.
    """
    assert [block_bytes(dtype, 64, 64) for dtype in ("f32", "bf16", "int8", "int4")] == [
        32 * n for n in (512, 256, 136, 72)
    ]
    assert [block_bytes(dtype, 192, 128) for dtype in ("f32", "bf16", "int8", "int4")] == [
        32 * n for n in (1280, 640, 328, 168)
    ]
    assert [block_bytes(dtype, 576, 0) for dtype in ("f32", "bf16", "int8", "int4")] == [
        32 * n for n in (2304, 1152, 580, 292)
    ]
    assert block_bytes("k8v4", 64, 64) == 32 * (64 + 4 + 32 + 4)
    assert block_bytes("k8v4", 576, 0) == block_bytes("int8", 576, 0)
    groups = (KvGroup((0, 1), KvLayout(3, 128, 128)),)
    assert number_bytes(groups, "int8") == 1 + 8 / 256
    assert number_bytes(groups, "int4") == 0.5 + 8 / 256
    assert all(block_bytes("int4", head_dim, head_dim) % 64 == 0 for head_dim in range(2, 130, 2))


@pytest.mark.parametrize("n", [2, 6, 24, 64, 80])
def test_hadamard_is_its_own_inverse(n: int) -> None:
    rotation = hadamard(n)
    np.testing.assert_allclose(rotation @ rotation, np.eye(n), atol=1e-12)


@pytest.mark.parametrize(("dtype", "levels"), [("int8", 255), ("int4", 15)])
def test_quantised_kv_is_within_half_a_step(dtype: KvDtype, levels: int) -> None:
    """int4 cuts off ends of the range if the squared error gets smaller."""
    x = (
        np.random.default_rng(0).normal(0, 1, (50, 3, 64))
        * np.geomspace(1e-6, 1e6, 50)[:, None, None]
    )
    rotation = hadamard(64)
    turned, back = x @ rotation, round_trip(x, dtype) @ rotation
    low = turned.min(axis=-1, keepdims=True)
    step = np.ptp(turned, axis=-1, keepdims=True) / levels
    rounding = np.abs(turned) / 256  # to bf16
    if dtype == "int8":
        # The step and the least number are rounded outwards.
        assert (np.abs(back - turned) <= 1.02 * step / 2 + rounding).all()
        return
    whole = np.rint((turned - low) / step) * step + low
    errors = [((y - turned) ** 2).sum(axis=-1) for y in (back, whole)]
    assert (errors[0] <= 1.05 * errors[1]).all()
    assert errors[0].sum() < 0.9 * errors[1].sum()


def test_hadamard_spreads_an_outlier() -> None:
    """Rotation keeps an outlier from taking the range of other dimensions."""
    x = np.random.default_rng(0).normal(0, 1, (200, 64))
    x[:, 5] *= 40
    small = np.delete(np.arange(64), 5)
    levels = 15
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    plain = np.rint((x - low) / (high - low) * levels) * (high - low) / levels + low
    assert np.linalg.norm((round_trip(x, "int4") - x)[:, small]) < 0.5 * np.linalg.norm(
        (plain - x)[:, small]
    )


def test_exact_kv_round_trips() -> None:
    x = np.array([[0.0, 1.0, -2.0, 3.5]])
    assert (
        (round_trip(x, "f32") == x).all()
        and (round_trip(x, "bf16") == x).all()
        and (round_bf16(x) == x).all()
    )
    assert (round_trip(np.zeros((2, 8)), "int4") == 0).all()
    np.testing.assert_allclose(round_trip(np.full((2, 8), 3.0), "int8"), 3.0, rtol=0.01)
