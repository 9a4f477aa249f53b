"""The block pool alone: counts, copy-on-write, and runs of blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kv.blocks import NULL_BLOCK, BlockPool, Demand, Table


def test_allocate_takes_neighbours() -> None:
    pool = BlockPool(20, 4)
    first, second = Table(), Table()
    for length in range(1, 33):
        assert pool.allocate(first, 0, length) == []
        assert pool.allocate(second, 0, length) == []
    for table in (first, second):
        assert list(table) == list(range(table[0], table[0] + 8))
        assert table[0] % 8 == 0
    pool.check([first, second])


def test_a_table_starts_a_run_and_fills_it() -> None:
    pool = BlockPool(24, 4)
    single, long = Table(), Table()
    pool.allocate(single, 0, 4)
    pool.allocate(long, 0, 64)
    assert list(single) == [0] and list(long) == list(range(8, 24))
    pool = BlockPool(10, 4)  # the second run is short
    single, other = Table(), Table()
    for _ in range(2):
        pool.allocate(single, 0, 4)
        pool.allocate(other, 0, 8)
        assert list(single) == [0] and list(other) == [8, 9]
        pool.free(other)


def test_copies_are_neighbours() -> None:
    pool = BlockPool(24, 4)
    table = Table()
    pool.allocate(table, 0, 12)
    assert pool.allocate(pool.fork(table), 0, 12) == [(0, 8), (1, 9), (2, 10)]
    assert pool.allocate(pool.fork(table), 4, 8) == [(1, 16), (2, 17)]


def test_max_blocks_of_sequences_with_a_common_prefix() -> None:
    pool = BlockPool(20, 4)
    assert [pool.max_blocks(Demand(n)) for n in (0, 1, 8, 9)] == [0, 1, 2, 3]
    assert [pool.max_blocks(Demand(9, width=3, common=n)) for n in (0, 3, 6, 8)] == [9, 9, 7, 5]
    assert BlockPool(20, 1).max_blocks(Demand(3, width=2)) == 6
    assert isinstance(pool.max_blocks(Demand(9, width=3, common=6)), int)


def test_sharing_a_held_block_needs_no_free_block() -> None:
    pool = BlockPool(8, 4)
    table = Table()
    pool.allocate(table, 0, 12)
    blocks = list(table)
    fork = pool.fork(table)
    pool.trim(fork, 4)
    pool.cache(blocks[2], lambda block: None)
    pool.trim(table, 8)
    assert pool.num_evictable == 1 and pool.num_shared(blocks) == 2
    assert pool.evictable_blocks() == blocks[2:]


def test_null_blocks_before_shared_ones() -> None:
    pool = BlockPool(8, 4)
    table, other = Table(), Table()
    pool.allocate(table, 0, 12)
    pool.share(other, [NULL_BLOCK, NULL_BLOCK, table[2]])
    assert other.num_released == 2 and list(other) == [NULL_BLOCK, NULL_BLOCK, table[2]]
    pool.check([table, other])


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    table, other = Table(), Table()
    assert pool.allocate(table, 0, 9) == []
    assert pool.allocate(other, 0, 1) is None
    pool.trim(table, 5)
    before = list(table)
    assert pool.allocate(table, 5, 12) is None
    assert list(table) == before and not other and pool.num_free == 1
    pool.check([table])


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    pool = BlockPool(8, 4)
    parent = Table()
    pool.allocate(parent, 0, 6)
    child = pool.fork(parent)
    assert pool.num_free == 6
    (made,) = pool.allocate(child, 6, 3) or []
    assert made == (parent[1], child[1]) and child[0] == parent[0] and len(child) == 3
    assert pool.allocate(parent, 6, 1) == []  # the last owner writes in place
    pool.check([parent, child])


def test_the_last_free_block_is_enough_for_a_copy() -> None:
    pool = BlockPool(2, 4)
    table = Table()
    pool.allocate(table, 0, 3)
    assert pool.allocate(pool.fork(table), 3, 1) == [(0, 1)]
    assert pool.allocate(pool.fork(table), 3, 1) is None


def test_no_copy_of_full_blocks() -> None:
    pool = BlockPool(8, 4)
    parent = Table()
    pool.allocate(parent, 0, 8)
    child = pool.fork(parent)
    assert pool.allocate(child, 8, 1) == []
    assert list(child[:2]) == list(parent)


def test_keep_path_moves_the_path_and_frees_the_rest() -> None:
    pool = BlockPool(8, 4)
    table = Table()
    pool.allocate(table, 0, 16)
    slots = [pool.slot(table, i) for i in range(12)]
    moves = pool.keep_path(table, 3, [0, 2, 5])
    assert moves[0] == (slots[5], slots[4])
    assert len(moves) == 2 and len(table) == 2
    pool.check([table])


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(4, 4)
    table = Table()
    pool.allocate(table, 0, 4)
    again = Table(table)
    pool.free(table)
    pool.free(table)
    with pytest.raises(AssertionError, match="already free"):
        pool.free(again)


@given(num_blocks=st.integers(1, 40), lengths=st.lists(st.integers(1, 30), max_size=30))
@settings(max_examples=50, deadline=None)
def test_every_block_can_be_used(num_blocks: int, lengths: list[int]) -> None:
    pool = BlockPool(num_blocks, 2)
    tables: list[Table] = []
    for length in lengths:
        table = Table()
        if pool.allocate(table, 0, length) is None:
            assert pool.blocks_for(length) > pool.num_free
            pool.free(tables.pop(0)) if tables else None
        else:
            tables.append(table)
        pool.check(tables)
    rest = Table()
    assert pool.allocate(rest, 0, 2 * pool.num_free) == []
    assert pool.num_free == 0


class Pool(RuleBasedStateMachine):
    """Sequences grow, fork, rewind and end, checked against the content that each must read."""

    @initialize(num_blocks=st.integers(1, 24), block_size=st.sampled_from([1, 2, 4]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.seqs: list[tuple[Table, list[int]]] = []  # (table, content by index)
        self.memory: dict[int, int] = {}
        self.written = 0

    @rule()
    def new(self) -> None:
        self.seqs.append((Table(), []))

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0), length=st.integers(1, 9))
    def grow(self, which: int, length: int) -> None:
        table, content = self.seqs[which % len(self.seqs)]
        before = [list(table) for table, _ in self.seqs]
        copies = self.pool.allocate(table, len(content), length)
        if copies is None:
            assert before == [list(table) for table, _ in self.seqs]
            return
        size = self.pool.block_size
        for source, target in copies:
            self.memory |= {
                target * size + i: self.memory.get(source * size + i, -1) for i in range(size)
            }
        for index in range(len(content), len(content) + length):
            self.written += 1
            self.memory[self.pool.slot(table, index)] = self.written
            content.append(self.written)

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0))
    def fork(self, which: int) -> None:
        table, content = self.seqs[which % len(self.seqs)]
        self.seqs.append((self.pool.fork(table), list(content)))

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0), keep=st.integers(0, 40))
    def rewind(self, which: int, keep: int) -> None:
        table, content = self.seqs[which % len(self.seqs)]
        del content[keep:]
        self.pool.trim(table, len(content))

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0))
    def end(self, which: int) -> None:
        table, _ = self.seqs.pop(which % len(self.seqs))
        self.pool.free(table)
        assert not table

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([table for table, _ in self.seqs])
        for table, content in self.seqs:
            assert [self.memory[self.pool.slot(table, i)] for i in range(len(content))] == content


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
