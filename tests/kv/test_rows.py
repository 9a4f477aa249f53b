"""The arrays of a batch, made from block tables."""

import numpy as np
import pytest

from headrace.batch import Ints
from headrace.kv.blocks import NULL_BLOCK, Table
from headrace.kv.manager import Copy
from headrace.kv.rows import TokenRun, batch_of_runs, kv_rows, move_slots, slots_of

LONG, SHORT = (Table([5, 2]), Table([NULL_BLOCK, NULL_BLOCK, 4, 6], 2)), (Table([7]), Table([3]))
"""The tables of two sequences in two groups; the first has let go of two blocks in the second
group.
"""


def test_slots_and_block_tables_of_each_group() -> None:
    first, second = kv_rows([LONG, SHORT], [range(9, 12), range(0, 2)], 6)
    assert first.slots.tolist() == [2 * 6 + 3, 2 * 6 + 4, 2 * 6 + 5, 42, 43]
    assert second.slots.dtype == first.block_table.dtype == np.int32
    assert first.block_table.tolist() == [[5, 2], [7, 0]]
    assert second.block_table.tolist() == [
        [6, 6, 4, 6],
        [3, 0, 0, 0],
    ]  # released blocks have a number of the same table


def test_slots_after_released_blocks() -> None:
    (rows,) = kv_rows([LONG[1:]], [range(13, 20)], 6)
    assert rows.slots.tolist() == [25, 26, 27, 28, 29, 36, 37]


@pytest.mark.parametrize("block_size", [1, 3, 4, 32])
def test_slots_of_chunks_in_blocks_of_any_size(block_size: int) -> None:
    table, chunks = Table(range(40, 0, -1)), [range(0, 1), range(2, 11), range(7, 8), range(11, 36)]
    slots = slots_of([table] * len(chunks), chunks, block_size)
    assert slots.tolist() == [
        table[i // block_size] * block_size + i % block_size for chunk in chunks for i in chunk
    ]


def test_a_batch_of_runs() -> None:
    runs = [TokenRun([8, 9, 10], 9, LONG), TokenRun([11, 12], 0, SHORT)]
    batch = batch_of_runs(runs, 6, logits=True)
    assert [array.tolist() for array in batch[:5]] == [
        [8, 9, 10, 11, 12],
        [9, 10, 11, 0, 1],
        [0, 3, 5],
        [9, 0],
        [3, 2],
    ]
    assert all(array.dtype == np.int32 for array in (*batch[:5], batch.logit_rows, batch.seq_of))
    for found, wanted in zip(
        batch.kv, kv_rows([LONG, SHORT], [range(9, 12), range(0, 2)], 6), strict=True
    ):
        assert (
            found.slots.tolist() == wanted.slots.tolist()
            and found.block_table.tolist() == wanted.block_table.tolist()
        )
    assert (batch.ancestors, batch.logit_rows.tolist(), batch.seq_of.tolist()) == (
        None,
        [2, 4],
        [0, 1],
    )
    without = batch_of_runs(runs, 6, logits=False)
    assert (
        without.logit_rows.tolist() == without.seq_of.tolist() == []
        and without.tokens.tolist() == batch.tokens.tolist()
    )


def test_moves_are_made_in_order_within_each_group() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.moves: list[tuple[int, list[int], list[int]]] = []

        def move_slots(self, group: int, source: Ints, target: Ints) -> None:
            assert source.dtype == target.dtype == np.int32
            self.moves.append((group, source.tolist(), target.tolist()))

    recorder = Recorder()
    move_slots(recorder, [])
    assert recorder.moves == []
    move_slots(recorder, [Copy(1, 5, 6), Copy(0, 9, 1), Copy(1, 6, 2)])
    assert sorted(recorder.moves) == [(0, [9], [1]), (1, [5, 6], [6, 2])]
