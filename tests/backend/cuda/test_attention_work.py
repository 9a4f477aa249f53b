"""Work lists of attention: every row sees its keys once, and all lists fit."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace._native import GpuWork
from headrace.backend.cuda.attention_work import (
    FIELDS,
    ROW_FIELDS,
    WorkArrays,
    WorkSize,
    build_work,
    min_partials,
)
from headrace.backend.reference.ops import Step
from headrace.batch import RaggedBatch
from tests.backend.batches import Sequence
from tests.backend.cuda.attention_steps import random_steps, shuffled_sequences

BLOCK = 4
SHAPES = st.builds(
    GpuWork,
    rows_per_tile=st.sampled_from([1, 3, 16]),
    units_per_item=st.sampled_from([1, 8]),
    programs=st.sampled_from([1, 20, 1000]),
    split=st.sampled_from([16, 32]),
    window=st.sampled_from([0, 0, 1, 5, 40]),
    num_sink_tokens=st.just(0),
) | st.builds(
    GpuWork,
    st.sampled_from([1, 5]),
    st.just(2),
    st.just(200),
    st.just(16),
    st.sampled_from([1, 20]),
    st.sampled_from([1, 17, 60]),
)


def arrays_for(items: int, rows: int, paths: int) -> WorkArrays:
    return WorkArrays(
        *(np.full(shape, -7, np.int32) for shape in ((items, FIELDS), 1, (rows, ROW_FIELDS), paths))
    )


def partial_results(
    work: WorkArrays, shape: GpuWork, table: NDArray[Any], num_rows: int
) -> dict[int, tuple[int, list[int]]]:
    """The row of each partial result and the slots that it covers, read as the kernel
    reads the lists.
    """
    found: dict[int, tuple[int, list[int]]] = {}
    for first, rows, offset, low, end, begin, stop, ordinal, base, path in work.items[
        : work.num_items[0]
    ].tolist():
        assert (
            begin < stop and first >= 0 and first + rows <= num_rows and rows <= shape.rows_per_tile
        )
        window = max(0, low - shape.window + 1) if shape.window else 0
        for row in range(first, first + rows):
            start, count, index = work.rows[row].tolist()
            assert ordinal < count
            slots = []
            for key in range(begin * shape.split, min(stop * shape.split, end)):
                is_seen = (
                    not shape.window or key > index - shape.window or key < shape.num_sink_tokens
                )
                if key <= index and is_seen:
                    assert key >= window or key < shape.num_sink_tokens
                    place = base + int(work.paths[path + key - base]) if key >= base else key
                    slots.append(int(table[offset - 3 + place // BLOCK]) * BLOCK + place % BLOCK)
            assert start + ordinal not in found
            found[start + ordinal] = (row, slots)
    return found


def slots_seen(batch: RaggedBatch, shape: GpuWork) -> list[list[int]]:
    """Slots that each row sees in the reference and in the window."""
    executable: Any = SimpleNamespace(kv=SimpleNamespace(block_size=BLOCK))
    seen = []
    for slots in Step(executable, batch).visible(0):
        before = max(0, len(slots) - shape.window) if shape.window else 0
        seen.append(
            [*slots[: min(before, shape.num_sink_tokens)].tolist(), *slots[before:].tolist()]
        )
    return seen


@settings(max_examples=150, deadline=None)
@given(
    shape=SHAPES,
    counts=st.sampled_from([[1], [1, 1, 7], [30, 60]]),
    nodes=st.sampled_from([0, 12]),
    spare=st.sampled_from([0, 9, 1000]),
    seed=st.integers(0, 2**16),
)
def test_every_row_sees_its_keys_once_in_order(
    shape: GpuWork, counts: list[int], nodes: int, spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for batch, _, _ in random_steps(
        rng, shuffled_sequences(rng, int(rng.integers(1, 6)), 60, BLOCK), counts, nodes, 3
    ):
        num_rows, table = len(batch.tokens), batch.kv[0].block_table
        work = arrays_for(
            min_partials(num_rows, nodes, shape.split) + spare, num_rows + 2, num_rows * nodes
        )
        size = build_work(batch, shape, 3, table.shape[1], work)
        found = partial_results(work, shape, table.ravel(), num_rows)
        assert sorted(found) == list(range(size.partials)) and size.partials <= len(work.items)
        of_rows = [[] for _ in range(num_rows)]
        for _, (row, slots) in sorted(found.items()):
            of_rows[row] += slots
        assert of_rows == slots_seen(batch, shape)
        assert work.rows[:num_rows, 1].sum() == size.partials and not work.rows[num_rows:].any()
        assert (work.items[size.items :] == -7).all() and (work.paths[size.paths :] == -7).all()


def decoding(contexts: list[int]) -> RaggedBatch:
    """One row per sequence."""
    number = len(contexts)
    ones = np.ones(number, np.int32)
    return RaggedBatch(
        ones,
        ones,
        np.arange(number + 1, dtype=np.int32),
        np.array(contexts, np.int32),
        ones,
        (),
        None,
        ones,
        ones,
    )


def test_long_contexts_are_split_into_items() -> None:
    work, shape = arrays_for(500, 64, 0), GpuWork(16, 8, 264, 512)
    assert build_work(decoding([8191] * 4), shape, 0, 1, work) == WorkSize(
        64, 0, 64
    )  # programs take one split or two each
    assert build_work(decoding([8191] * 64), shape, 0, 1, work) == WorkSize(64, 0, 64)
    assert build_work(decoding([100_000] + [500] * 63), shape, 0, 1, work).items == 196 + 63
    assert (work.items[:259, 6] - work.items[:259, 5] == 1).all()


def test_arrays_that_are_too_small_raise() -> None:
    with pytest.raises(ValueError, match="5 partial results of attention, and there is room for 4"):
        build_work(decoding([9] * 5), GpuWork(16, 1, 1, 16), 0, 1, arrays_for(4, 5, 0))
    rng = np.random.default_rng(0)
    sequences: list[Sequence] = shuffled_sequences(rng, 1, 60, BLOCK)
    batch = next(
        batch
        for batch, _, drafts in random_steps(rng, sequences, [1], 12, 3)
        if len(drafts[0][0]) > 5
    )
    with pytest.raises(ValueError, match="more than 1 ancestors"):
        build_work(batch, GpuWork(16, 1, 1, 16), 0, 1, arrays_for(200, 20, 1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"row_start": [0, 2, 2, 3]}, "a sequence has rows, a"),
        ({"row_start": [1, 2, 3, 4]}, "begin at 0"),
        ({"row_start": [0, 1, 2]}, "needs row_start"),
        ({"row_start": [0, 1, 2, 9]}, "no room for the records"),
        ({"scheduled_len": [1, 1, 2]}, "a sequence has rows, a"),
        ({"context_len": [0, -1, 0]}, "a context has between"),
    ],
)
def test_invalid_batches_raise(wrong: dict[str, list[int]], message: str) -> None:
    """No access goes beyond the end of an array."""
    batch = decoding([4, 5, 6])._replace(
        **{name: np.array(values, np.int32) for name, values in wrong.items()}
    )
    with pytest.raises(ValueError, match=message):
        build_work(batch, GpuWork(16, 1, 1, 16), 0, 1, arrays_for(9, 5, 0))


def test_arrays_of_another_dtype_raise() -> None:
    batch, work, good = decoding([4, 5, 6]), GpuWork(16, 1, 1, 16), arrays_for(9, 5, 0)
    with pytest.raises(ValueError, match="items must have 10 numbers"):
        build_work(batch, work, 0, 1, good._replace(items=np.zeros((9, 9), np.int32)))
    for name, array in good._asdict().items():
        with pytest.raises(TypeError):  # and never written to a copy
            build_work(batch, work, 0, 1, good._replace(**{name: array.astype(np.int64)}))
    with pytest.raises(ValueError, match="ancestors must be"):
        build_work(batch._replace(ancestors=np.zeros((2, 1), np.uint64)), work, 0, 1, good)
    for shape in ((0, 1, 1, 16), (1, 1, 1, 0), (1, 1, 1, 16, 0, 4), (1, 1, 1, 16, -1)):
        with pytest.raises(ValueError):
            GpuWork(*shape)


@settings(max_examples=150, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_build_work_writes_only_to_its_arrays(shape: GpuWork, seed: int) -> None:
    """Nearly valid batches with random ancestor bits, and arrays that may be too small."""
    rng = np.random.default_rng(seed)
    rows_of = rng.integers(1, 9, rng.integers(1, 5))
    row_start = np.concatenate([[0], rows_of.cumsum()]) + (rng.random(len(rows_of) + 1) < 0.03)
    words, num_rows = int(rng.integers(1, 3)), int(row_start[-1])
    bits = rng.integers(0, 2**64, (num_rows, words), np.uint64) & rng.integers(
        0, 2**64, (num_rows, words), np.uint64
    )
    batch = decoding([1])._replace(
        row_start=row_start.astype(np.int32),
        context_len=rng.choice([0, 1, 40, 2**20, 2**30 - 1], len(rows_of)).astype(np.int32),
        scheduled_len=np.array(
            [rng.integers(0 if rng.random() < 0.03 else 1, n + 1) for n in rows_of], np.int32
        ),
        ancestors=(bits * (rng.random((num_rows, 1)) < 0.7)).astype(np.uint64)
        if rng.random() < 0.7
        else None,
    )
    sizes = {
        "items": int(rng.choice([1, 20, 400])) * FIELDS,
        "num_items": 1,
        "rows": (num_rows + 2) * ROW_FIELDS,
        "paths": 50 * num_rows,
    }
    whole = {name: np.full(size + 2 * FIELDS, -7, np.int32) for name, size in sizes.items()}
    inner = {name: array[FIELDS:-FIELDS] for name, array in whole.items()}
    out = WorkArrays(
        inner["items"].reshape(-1, FIELDS),
        inner["num_items"],
        inner["rows"].reshape(-1, ROW_FIELDS),
        inner["paths"],
    )
    with suppress(ValueError):
        size = build_work(batch, shape, 0, 4, out)
        assert 0 <= size.items <= size.partials <= len(out.items)
    for array in whole.values():
        assert (array[:FIELDS] == -7).all() and (array[-FIELDS:] == -7).all()
