"""Attention over ragged rows against the reference, and the same bits for a row in every batch."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backend.cuda.kv_store import KvFormat
from tests.backend.batches import batch_of
from tests.backend.cuda.attention_steps import (
    TILES,
    TOLERANCE,
    Device,
    Layer,
    Rows,
    Truth,
    random_steps,
    shuffled_sequences,
)
from tests.backend.cuda.examples import examples

FORMATS = get_args(KvFormat)
SIZES = [
    (2, 2),
    (6, 6),
    (16, 16),
    (24, 24),
    (32, 32),
    (80, 80),
    (40, 24),
    (16, 32),
    (6, 20),
    (20, 6),
]
LATENT = [(48, 32), (24, 16), (80, 64), (64, 48), (6, 2), (36, 36), (20, 18)]
EXTRAS = {
    "share": st.sampled_from([1, 2, 5]),
    "window": st.sampled_from([0, 0, 1, 7, 40]),
    "softcap": st.sampled_from([0.0, 0.0, 0.7, 20.0]),
    "sloped": st.booleans(),
    "has_sinks": st.booleans(),
    "num_sink_tokens": st.sampled_from([0, 0, 1, 5, 40]),
}
LAYERS = st.one_of(
    st.builds(
        lambda heads, sizes, **extras: Layer(heads, key_dim=sizes[0], value_dim=sizes[1], **extras),
        st.sampled_from([1, 2, 3]),
        st.sampled_from(SIZES),
        has_key_bias=st.booleans(),
        **EXTRAS,
    ),
    st.builds(
        lambda sizes, **extras: Layer(
            1, key_dim=sizes[0], value_dim=sizes[1], latent=True, **extras
        ),
        st.sampled_from(LATENT),
        **EXTRAS,
    ),
)


COMMON = {
    "layer": LAYERS,
    "nodes": st.sampled_from([0, 6]),
    "block_size": st.sampled_from([4, 16, 32]),
    "seed": st.integers(0, 2**16),
}
BATCH = [list(range(40)) * 3], [([], [])], False
"""A prompt of several splits."""
WIDE = TILES._replace(rows=64, programs=2, min_units=2, narrow=TILES._replace(is_turned=True))


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=examples(5), deadline=None)
@example(layer=Layer(2, 2, 24, 24, has_key_bias=True), nodes=6, block_size=16, packed=False, seed=1)
@given(packed=st.booleans(), **COMMON)
def test_equals_reference(
    dtype: KvFormat, layer: Layer, nodes: int, block_size: int, packed: bool, seed: int
) -> None:
    rng, rows, blocks = np.random.default_rng(seed), Rows.random(layer, seed), 96 // block_size
    sequences = shuffled_sequences(rng, 2, blocks, block_size)
    device, truth = (
        Device(layer, rows, dtype, 2 * blocks + 1, block_size, WIDE),
        Truth(layer, rows, dtype, 2 * blocks + 1, block_size),
    )
    for batch, _, _ in random_steps(rng, sequences, [1, 3, 30, 60], nodes, 2):
        got, want = (
            device.run(batch, int(rng.integers(3)), int(rng.choice([0, 500])), packed),
            truth.run(batch),
        )
        assert np.linalg.norm(got - want) <= (
            0.01 if packed else TOLERANCE[dtype]
        ) * np.linalg.norm(want)


def alone(
    layer: Layer, rows: Rows, dtype: KvFormat, tokens: list[int], most: int, seed: int
) -> NDArray[np.float32]:
    """The results of a sequence that is by itself, in chunks of at most so many rows, with blocks,
    tiles and programs of other sizes.
    """
    rng = np.random.default_rng(seed)
    tiles = TILES._replace(
        rows=int(rng.choice([16, 32, 128])),
        split=16 << seed % 2,
        programs=int(rng.integers(1, 40)),
        min_units=int(rng.integers(1, 40)),
        is_turned=bool(rng.integers(2)),
        narrow=TILES if rng.integers(2) else None,
    )
    sequence = shuffled_sequences(rng, 1, 16, 8)[0]
    device, results = Device(layer, rows, dtype, 17, 8, tiles), []
    while (start := sequence.computed) < len(tokens):
        chunk = tokens[start : start + int(rng.integers(1, most + 1))]
        results.append(
            device.run(
                batch_of([sequence], [chunk], [([], [])], False),
                int(rng.integers(2)),
                int(rng.choice([0, 500])),
            )
        )
        sequence.computed += len(chunk)
    return np.concatenate(results)


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=examples(2), deadline=None)
@given(**COMMON)
@example(layer=Layer(2, 2, 24, 24, window=40, num_sink_tokens=5), nodes=6, block_size=16, seed=1)
@example(layer=Layer(2, 2, 24, 24, has_key_bias=True), nodes=6, block_size=16, seed=1)
def test_a_row_has_the_same_bits_in_any_batch(
    dtype: KvFormat, layer: Layer, nodes: int, block_size: int, seed: int
) -> None:
    rng, rows, blocks = np.random.default_rng(seed), Rows.random(layer, seed), 96 // block_size
    sequences = shuffled_sequences(rng, 2, blocks, block_size)
    device = Device(
        layer, rows, dtype, 2 * blocks + 1, block_size, TILES._replace(split=16 << seed % 2)
    )
    tokens: list[int] = []
    results = []
    for batch, known, drafts in random_steps(rng, sequences, [1, 3, 30, 50], nodes, 2):
        got, (start, end) = device.run(batch, int(rng.integers(3))), batch.row_start[1:3]
        results.append(got[start : start + len(known[1])])
        tokens += known[1]
        if drafts[1][0]:
            path = [len(drafts[1][0]) - 1]
            while drafts[1][1][path[0]] >= 0:
                path.insert(0, drafts[1][1][path[0]])
            chain = alone(
                layer, rows, dtype, tokens + [drafts[1][0][node] for node in path], 100, seed
            )
            assert np.array_equal(
                got[start:end][[len(known[1]) + node for node in path]], chain[len(tokens) :]
            )
    assert np.array_equal(np.concatenate(results), alone(layer, rows, dtype, tokens, 40, seed))


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=examples(2), deadline=None)
@given(
    window=st.sampled_from([1, 7, 20, 33]),
    num_sink_tokens=st.sampled_from([0, 5, 40]),
    seed=st.integers(0, 2**16),
)
def test_blocks_behind_a_window_are_not_read(
    dtype: KvFormat, window: int, num_sink_tokens: int, seed: int
) -> None:
    layer, rng = (
        Layer(2, 2, window=window, num_sink_tokens=num_sink_tokens),
        np.random.default_rng(seed),
    )
    rows = Rows.random(layer, seed)
    sequence = shuffled_sequences(rng, 1, 32, 4)[0]
    whole, freed = (Device(layer, rows, dtype, 33, 4, WIDE) for _ in range(2))
    for batch, known, _ in random_steps(rng, [sequence], [1, 20, 40], 5, 3):
        table = batch.kv[0].block_table.copy()
        first, last = (
            -(-num_sink_tokens // 4),
            max(0, sequence.computed + 1 - window) // 4,
        )  # blocks from the first to before the last
        freed.forget(table[0, first:last].tolist())
        table[0, first:last] = 0
        assert np.array_equal(
            whole.run(batch),
            freed.run(batch._replace(kv=(batch.kv[0]._replace(block_table=table),))),
        )
        assert len(known) == 1


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "layer", [Layer(2, 2), Layer(1, 3, 32, 16, latent=True), Layer(1, 2, 16, 16, latent=True)]
)
@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_what_is_not_finite_reaches_the_rows_that_see_it(
    dtype: KvFormat, layer: Layer, what: str
) -> None:
    clean, poison, number = (
        Rows.random(layer, 0),
        7,
        np.inf if dtype in ("bf16", "int8") else np.nan,
    )
    if getattr(clean, what) is None:
        return
    rows = clean._replace(**{what: getattr(clean, what).copy()})
    getattr(rows, what)[poison, 3] = number
    sequence = shuffled_sequences(np.random.default_rng(0), 1, 4, 16)[0]
    cases = [
        (
            [t for t in range(12) if t != poison],
            ([1, poison, 2, 3, 4], [-1, 0, 1, 0, -1]),
            [12, 13],
        ),  # node 2 sees node 1, which is bad
        (
            [*range(20, 26), poison, 9],
            ([1], [-1]),
            [6, 7, 8],
        ),  # rows of one tile, of which the first do not see the one that is bad
    ]
    for known, drafts, seeing in cases:
        batch, bad = (
            batch_of([sequence], [known], [drafts], True),
            seeing[: 1 if what == "q" else None],
        )
        got, want = (Device(layer, r, dtype, 5, 16, WIDE).run(batch) for r in (rows, clean))
        assert np.isnan(got[bad, : layer.value_dim * (1 if what == "q" else layer.share)]).all()
        assert np.array_equal(np.delete(got, bad, axis=0), np.delete(want, bad, axis=0))


@pytest.mark.parametrize("dtype", FORMATS)
def test_splits_have_the_same_bits_in_one_item_or_many(dtype: KvFormat) -> None:
    layer, tokens = Layer(2, 2, has_sinks=True), list(range(40)) * 3
    rows, sequence, results = (
        Rows.random(layer, 0),
        shuffled_sequences(np.random.default_rng(0), 1, 8, 16)[0],
        [],
    )
    for min_units in (1, 1000):
        device = Device(layer, rows, dtype, 9, 16, WIDE._replace(split=16, min_units=min_units))
        device.run(batch_of([sequence], [tokens], [([], [])], False))
        sequence.computed = len(tokens)
        results.append(device.run(batch_of([sequence], [[5]], [([1, 2, 3], [-1, -1, 0])], True)))
        sequence.computed = 0
    assert np.array_equal(*results)


@pytest.mark.parametrize(("dtype", "number"), [("bf16", 1), ("fp8", 1), ("int8", 3)])
def test_one_launch_attends_and_merges(dtype: KvFormat, number: int) -> None:
    """Rotated KV takes a launch before, for queries, and one after, for results."""
    layer = Layer(2, 2)
    device = Device(layer, Rows.random(layer, 0), dtype, 9, 16)
    device.run(batch_of([shuffled_sequences(np.random.default_rng(0), 1, 8, 16)[0]], *BATCH))
    assert len(device.launches) == number


@pytest.mark.parametrize("layer", [Layer(1, 35), Layer(1, 16, 576, 512, latent=True, scale=0.05)])
def test_layers_wider_than_a_tile(layer: Layer) -> None:
    rows, sequence = (
        Rows.random(layer, 0),
        shuffled_sequences(np.random.default_rng(0), 1, 4, 16)[0],
    )
    batch = batch_of([sequence], [list(range(20))], [([], [])], False)
    got, want = (
        Device(layer, rows, "f32", 5, 16).run(batch),
        Truth(layer, rows, "f32", 5, 16).run(batch),
    )
    assert np.allclose(got, want, atol=1e-5)
