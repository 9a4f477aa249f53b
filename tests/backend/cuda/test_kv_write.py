"""Keys and values in their slots, against what the number format means, and queries rotated on the
way.
"""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backend.cuda.kernels.kv_write import kv_write, rope_write
from headrace.backend.cuda.kernels.rope import rope
from headrace.backend.cuda.kv_store import KvFormat, KvStore
from headrace.backend.reference.ops import rotate
from headrace.backend_traits import KvDtype
from headrace.batch import ints
from headrace.errors import RequestError
from headrace.program.kv import KvGroup, KvLayout
from headrace.quant.kv import hadamard, round_trip
from tests.backend.cuda.attention_steps import on_device
from tests.backend.cuda.examples import examples

FORMATS = get_args(KvFormat)
BLOCKS = 5
SHAPES = st.fixed_dictionaries(
    {
        "rows": st.sampled_from([1, 3, 20]),
        "heads": st.sampled_from([1, 6, 10]),
        "kv_heads": st.sampled_from([1, 2, 5]),
        "dims": st.sampled_from(
            [(2, 2), (6, 6), (16, 16), (80, 80), (96, 96), (128, 128), (24, 10)]
        ),
        "rotated": st.sampled_from([1.0, 0.5]),
        "block_size": st.sampled_from([4, 16, 64]),
        "seed": st.integers(0, 2**16),
    }
)


def numbers(
    store: KvStore, codes: Any, scales: Any
) -> NDArray[np.float64]:  # [layers, slots, heads, dim]
    """What the store holds, as attention reads it."""
    x = codes.double()
    if store.format == "fp8":
        x = x * scales.double()
    if store.format == "int8":
        x = x * scales[..., 1:].double() + scales[..., :1].double()
    x = x.permute(0, 1, 3, 2, 4).flatten(1, 2).cpu().numpy()
    return x @ hadamard(x.shape[-1]) if store.uses_hadamard else x


def step_of(x: NDArray[np.float64], dtype: KvDtype) -> Any:
    """How far two floats with nearly the same value may lie apart in the store: where it rounds,
    one step.
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)
    steps = {
        "f32": 1e-6 * largest,
        "bf16": 2**-7 * np.abs(x),
        "fp8": 2**-3 * np.abs(x) + largest / 448 / 256,
    }
    return steps.get(dtype, 2 / 255 * np.ptp(x @ hadamard(x.shape[-1]), axis=-1, keepdims=True))


def assert_stored(got: NDArray[np.float64], x: NDArray[np.float64], dtype: KvDtype) -> None:
    """Nearly all as it should be, and those that lie at the border of two codes in one of both."""
    want = round_trip(x, dtype)
    apart = np.abs(got - want)
    assert (apart <= step_of(x, dtype) + 1e-6).all()
    assert np.linalg.norm(apart) <= 0.002 * np.linalg.norm(want) + 1e-6


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=examples(12), deadline=None)
@given(shape=SHAPES)
def test_what_is_written_is_what_the_format_means(dtype: KvFormat, shape: dict[str, Any]) -> None:
    rng, (key_dim, value_dim), rows = (
        np.random.default_rng(shape["seed"]),
        shape["dims"],
        shape["rows"],
    )
    heads, kv_heads, block_size = shape["heads"], shape["kv_heads"], shape["block_size"]
    pairs = max(1, int(key_dim // 2 * shape["rotated"]))
    store = KvStore(
        KvGroup((0, 3), KvLayout(kv_heads, key_dim, value_dim)), BLOCKS, block_size, dtype
    )
    widths = [heads * key_dim, kv_heads * key_dim, kv_heads * value_dim]
    x = rng.standard_normal((rows, sum(widths))).astype(np.float32) * rng.choice(
        [1e-3, 1, 50], (rows, 1)
    ).astype(np.float32)
    angle = rng.uniform(0, 7, (rows, pairs))
    angles = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    slots = np.concatenate(
        [rng.permutation(BLOCKS * block_size)[: rows - 1], [store.padding_slot]]
    ).astype(np.int32)
    wide = torch.cat(
        [on_device(x), torch.full((rows, 3), torch.nan, device=on_device(x).device)], dim=1
    )[:, : sum(widths)]
    q_out = torch.full((rows, widths[0]), torch.nan, device=wide.device)
    rope_write(q_out, wide, on_device(angles), on_device(slots, torch.int32), store, 3)()

    q, k, v = np.split(x.astype(np.float64), np.cumsum(widths)[:2], axis=1)
    assert np.allclose(
        q_out.cpu().numpy(),
        rotate(q, angles.astype(np.float64), key_dim),
        rtol=1e-5,
        atol=1e-5 * np.abs(x).max(),
    )
    keys, values = (
        numbers(store, store.keys, store.key_scales),
        numbers(store, store.values, store.value_scales),
    )
    assert not keys[0].any() and not values[0].any()
    assert_stored(
        keys[1, slots],
        rotate(k, angles.astype(np.float64), key_dim).reshape(rows, kv_heads, key_dim),
        dtype,
    )
    assert_stored(values[1, slots], v.reshape(rows, kv_heads, value_dim), dtype)
    assert dtype == "int8" or np.array_equal(
        values[1, slots], round_trip(v.reshape(rows, kv_heads, value_dim), dtype)
    )
    others = np.setdiff1d(np.arange((BLOCKS + 1) * block_size), slots)
    assert not keys[1, others].any() and not values[1, others].any()

    plain = KvStore(store.group, BLOCKS, block_size, dtype)
    turned = torch.empty((rows, widths[1]), device=wide.device)
    rope(turned, wide[:, widths[0] : sum(widths[:2])], on_device(angles), key_dim)()
    kv_write(turned, wide[:, sum(widths[:2]) :], on_device(slots, torch.int32), plain, 3)()
    for own, other in zip(plain.layer(3), store.layer(3), strict=True):
        assert own.float().equal(other.float())


@pytest.mark.parametrize("dtype", FORMATS)
def test_latent_rows_have_no_values(dtype: KvFormat) -> None:
    store = KvStore(KvGroup((7,), KvLayout(1, 40, 0)), 2, 8, dtype)
    k = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    kv_write(on_device(k), None, on_device([1, 9, 4], torch.int32), store, 7)()
    assert_stored(
        numbers(store, store.keys, store.key_scales)[0, [1, 9, 4], 0], k.astype(np.float64), dtype
    )
    assert store.values is None


@pytest.mark.parametrize("dtype", FORMATS)
def test_slots_move_one_after_the_other(dtype: KvFormat) -> None:
    store = KvStore(KvGroup((0, 1), KvLayout(2, 6, 4)), 3, 4, dtype)
    rng, slots = np.random.default_rng(0), on_device(np.arange(12), torch.int32)
    for layer in range(2):
        kv_write(
            on_device(rng.standard_normal((12, 12))),
            on_device(rng.standard_normal((12, 8))),
            slots,
            store,
            layer,
        )()
    pairs = [
        numbers(store, store.keys, store.key_scales),
        numbers(store, store.values, store.value_scales),
    ]
    source, target = [5, 3, 11, 3, 2], [3, 2, 3, 7, 0]
    for cache in pairs:
        for s, t in zip(source, target, strict=True):
            cache[:, t] = cache[:, s]
    store.move_slots(ints(source), ints(target))
    store.move_slots(ints([]), ints([]))
    assert np.array_equal(pairs[0], numbers(store, store.keys, store.key_scales))
    assert np.array_equal(pairs[1], numbers(store, store.values, store.value_scales))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("value_dim", [24, 0])
def test_bytes_are_those_of_the_tensors(dtype: KvFormat, value_dim: int) -> None:
    """And no more than memory is shared out by, which counts as the CPU keeps them."""
    group = KvGroup((2, 4, 5), KvLayout(2, 32, value_dim))
    store = KvStore(group, 7, 64, dtype)
    assert store.bytes == 8 * store.block_bytes and 0 < store.block_bytes <= group.block_bytes(
        dtype, 64
    )


def test_int4_is_refused_with_what_to_choose() -> None:
    with pytest.raises(RequestError, match="choose bf16, f16, f32, fp8 or int8"):
        KvStore(KvGroup((0,), KvLayout(1, 16, 16)), 1, 16, "int4")
