"""The KV of several groups of layers: all or none, reuse in windows, and promises that hold."""

from dataclasses import dataclass, field

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kv.blocks import NULL_BLOCK, Demand, Table
from headrace.kv.manager import BlockCopy, Copy, Tables
from headrace.kv.window import WindowPool
from headrace.program.kv import KvGroup, KvLayout
from tests.engine.test_machine import touched
from tests.engine.toy import toy_kv


@given(
    window=st.integers(1, 40),
    rows=st.integers(1, 20),
    size=st.sampled_from([1, 2, 3, 4, 32]),
    tokens=st.integers(1, 200),
    left=st.integers(1, 20),
    sinks=st.sampled_from([0, 0, 1, 5]),
)
@example(
    window=4, rows=20, size=2, tokens=40, left=1, sinks=0
)  # of which the rows that are left touch less than the others did
def test_max_blocks_of_a_window(
    window: int, rows: int, size: int, tokens: int, left: int, sinks: int
) -> None:
    kept = -(-sinks // size)
    most = min(-(-tokens // size), kept + touched(window, rows, size))
    group = KvGroup((0,), KvLayout(1, 2, 2), window, sinks)
    assert group.num_blocks(tokens, rows, size) == most
    pool = WindowPool(500, size, window, rows, sinks)
    assert (
        pool.max_blocks(Demand(tokens))
        == min(-(-tokens // size), kept + touched(window, min(rows, tokens), size))
        <= most
    )
    left = min(left, tokens)
    assert pool.max_blocks(Demand(tokens, computed=tokens - left)) == min(
        -(-tokens // size), kept + touched(window, min(rows, left), size)
    )
    assert pool.window_blocks == -(-(window - 1) // size)


def test_allocate_in_all_groups_or_none() -> None:
    kv = toy_kv(4, 4, (0, 6), max_rows=20)
    tables, other = kv.new_tables(), kv.new_tables()
    assert kv.allocate(tables, 0, 12) == []
    assert kv.allocate(other, 0, 5) is None
    assert not any(other) and [pool.num_free for pool in kv.pools] == [1, 1]
    kv.advance(tables, 12, 12)
    assert list(tables[1][:1]) == [-1] and [pool.num_free for pool in kv.pools] == [1, 2]
    assert kv.allocate(other, 0, 5) is None and not any(other)  # the one has two, the other has not
    assert kv.allocate(other, 0, 4) == []
    kv.check([tables, other])


def test_attention_sinks_are_never_released() -> None:
    """Of 40 tokens in blocks of 2, with a window of 5 and 3 sinks, the first two blocks and the
    window are held.
    """
    kv = toy_kv(20, 2, (5,), max_rows=4, sinks=3)
    (table,) = tables = kv.new_tables()
    assert kv.allocate(tables, 0, 40) == []
    held = [table.num_held]
    for start in range(0, 40, 4):
        kv.advance(tables, start, 40)
        assert kv.allocate(tables, start, 4) == []
        held.append(table.num_held)
        kv.check([tables])
    assert (
        max(held)
        == held[0]
        == KvGroup((0,), KvLayout(1, 2, 2), 5, 3).num_blocks(40, 4, 2)
        == kv.pools[0].max_blocks(Demand(40))
    )
    assert [block == NULL_BLOCK for block in table] == [False] * 2 + [True] * (
        table.window_start - 2
    ) + [False] * (20 - table.window_start)
    assert (
        table.window_start == kv.pools[0].first_visible(36)
        and kv.can_rewind(tables, 36)
        and not kv.can_rewind(tables, 33)
    )
    other = kv.fork(tables)
    kv.check([tables, other])
    kv.trim(other, 3)
    assert list(other[0]) == list(table[:2]) and other[0].num_released == 0
    kv.free(other)
    kv.free(tables)
    assert kv.pools[0].num_free == kv.pools[0].num_available == 20


def test_fits_next_to_promised_blocks() -> None:
    """A sequence holds 2 of 8 blocks of 4 tokens, and may need one more than its known tokens
    do.
    """
    kv = toy_kv(8, 4, (0,))
    tables = kv.new_tables()
    kv.allocate(tables, 0, 8)
    held = list(tables[0])
    for promised, most in (
        (Demand(8, 8), 5),
        (Demand(4, 4), 5),
        (Demand(9, 8), 4),
        (Demand(16, 8), 3),
    ):
        running = [(tables, promised)]
        assert kv.fits(Demand(4 * most, 0), [[]], running)
        assert not kv.fits(Demand(4 * most + 1, 0), [[]], running)
        assert kv.fits(Demand(4 * most + 8, 0), [held], running) and not kv.fits(
            Demand(4 * most + 9, 0), [held], running
        )
    assert kv.fits(Demand(24, 0), [[]]) and not kv.fits(Demand(25, 0), [[]])


def test_a_window_reuses_the_blocks_it_releases() -> None:
    pool, table = WindowPool(20, 2, 5, 4), Table()
    pool.allocate(table, 0, 40)
    assert len(table) == 5
    for computed, num_known, released, length in (
        (8, 40, 2, 7),
        (10, 40, 3, 8),
        (12, 17, 4, 9),
        (14, 17, 5, 9),
        (14, 40, 5, 9),
    ):
        pool.advance(table, computed, num_known)
        assert (table.num_released, len(table)) == (released, length)
    assert pool.num_shared(table[5:]) == 0  # each table pays for its own
    pool.check([table])


def test_a_fork_copies_and_moves_in_each_group() -> None:
    kv = toy_kv(8, 4, (0, 3))
    tables = kv.new_tables()
    kv.allocate(tables, 0, 6)
    child = kv.fork(tables)
    copies = kv.allocate(child, 6, 2) or []
    assert copies == [
        BlockCopy(group, tables[group][1], child[group][1], num_slots=2) for group in range(2)
    ]
    assert kv.slot_copies(copies[:1]) == [
        Copy(0, tables[0][1] * 4 + i, child[0][1] * 4 + i) for i in range(2)
    ]
    kv.allocate(tables, 6, 10)
    slots = [
        [pool.slot(table, i) for i in range(16)]
        for pool, table in zip(kv.pools, tables, strict=True)
    ]
    assert kv.keep_path(tables, 7, [0, 2]) == [
        Copy(group, slots[group][9], slots[group][8]) for group in range(2)
    ]
    assert [len(table) for table in tables] == [3, 3]


def test_a_long_prompt_reuses_the_blocks_it_releases() -> None:
    """A window never holds more blocks than at first, and others may have the rest."""
    kv = toy_kv(100, 2, (0, 5), max_rows=4)
    full, windowed = kv.pools
    tables = kv.new_tables()
    assert kv.allocate(tables, 0, 120) == [] and len(tables[0]) == 60
    most = touched(5, 4, 2)
    assert len(tables[1]) == most
    while windowed.num_available:
        windowed.allocate(Table(), 0, 1)
    for computed in range(0, 120, 3):
        kv.advance(tables, computed, 120)
        assert kv.allocate(tables, computed, min(4, 120 - computed)) == []
        assert tables[1].num_held <= most
    assert tables[1].num_released == (117 + 1 - 5) // 2 and full.num_free == 40


@pytest.mark.parametrize("windows", [(5,), (0, 5)])
def test_in_a_window_each_table_pays_for_its_blocks(windows: tuple[int, ...]) -> None:
    kv = toy_kv(8, 2, windows, max_rows=3)
    pool = kv.pools[-1]
    tables, alone = kv.new_tables(), kv.new_tables()
    kv.allocate(tables, 0, 6)
    kv.allocate(alone, 0, 1)
    forks = [kv.fork(tables) for _ in range(2)]
    assert pool.num_free == 4 and pool.num_available == 8 - 3 * 3 - 1 and kv.is_overcommitted
    assert kv.allocate(forks[0], 6, 1) is None
    assert kv.allocate(alone, 1, 1) == []  # there already
    kv.free(forks.pop())
    assert (
        not kv.is_overcommitted and kv.allocate(forks[0], 5, 1) is not None
    )  # the copy replaces the shared block
    kv.check([tables, alone, *forks])


@given(
    window=st.integers(1, 12),
    size=st.sampled_from([1, 2, 4]),
    windows=st.booleans(),
    computed=st.integers(0, 30),
)
def test_can_rewind(window: int, size: int, windows: bool, computed: int) -> None:
    """A sequence can rewind to any token for which all visible blocks still exist."""
    kv = toy_kv(40, size, (0, window) if windows else (0,), max_rows=40)
    tables = kv.new_tables()
    assert kv.allocate(tables, 0, 31) == []
    kv.advance(tables, computed, 31)
    for token in range(31):
        seen = range(max(0, token + 1 - window), token + 1)
        assert kv.can_rewind(tables, token) == (
            not windows or all(tables[1][i // size] != NULL_BLOCK for i in seen)
        )


@given(
    num_blocks=st.integers(3, 20),
    size=st.sampled_from([1, 2, 4]),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=2),
    more=st.lists(st.integers(0, 40), min_size=2, max_size=2),
)
@example(
    num_blocks=3, size=2, lengths=[1, 1], more=[2, 2]
)  # half a block more of either is two blocks more
def test_can_extend_and_num_slots_after(
    num_blocks: int, size: int, lengths: list[int], more: list[int]
) -> None:
    """The predictions equal the blocks that allocation finds."""
    kv = toy_kv(
        num_blocks, size, (0, 100), max_rows=100
    )  # the second group is as full as the first
    tables = [kv.new_tables() for _ in lengths]
    assume(
        all(
            kv.allocate(each, 0, length) is not None
            for each, length in zip(tables, lengths, strict=True)
        )
    )
    beyond = kv.num_slots_after(tables[0], lengths[0])
    free = num_blocks - sum(-(-length // size) for length in lengths)
    assert beyond == (-(-lengths[0] // size) + free) * size - lengths[0]
    assert (
        kv.allocate(tables[0], lengths[0], beyond + 1) is None
        and kv.allocate(tables[0], lengths[0], beyond) == []
    )
    kv.trim(tables[0], lengths[0])
    ends = [length + num for length, num in zip(lengths, more, strict=True)]
    can = kv.can_extend(tables, ends)
    assert can == (sum(-(-end // size) for end in ends) <= num_blocks)
    assert can == all(
        kv.allocate(each, length, num) is not None
        for each, length, num in zip(tables, lengths, more, strict=True)
    )


@dataclass(eq=False)
class Sequence:
    """The content that a sequence must read, by index, and the number of tokens it was admitted
    for.
    """

    tables: Tables
    content: list[int] = field(default_factory=list)
    num_known: int = 0


class Manager(RuleBasedStateMachine):
    """Sequences with chunked prompts grow, fork, rewind and end, checked against the content that
    each must read.
    """

    @initialize(
        num_blocks=st.integers(2, 30),
        block_size=st.sampled_from([1, 2, 4]),
        max_rows=st.integers(1, 9),
        windows=st.sampled_from([(0,), (0, 4), (3,), (2, 0, 7), (5, 1)]),
        sinks=st.sampled_from([0, 0, 1, 3]),
    )
    def start(
        self, num_blocks: int, block_size: int, max_rows: int, windows: tuple[int, ...], sinks: int
    ) -> None:
        self.windows, self.sinks = windows, sinks
        self.kv = toy_kv(num_blocks, block_size, windows, max_rows, sinks)
        self.memory: list[dict[int, int]] = [{} for _ in windows]
        self.seqs: list[Sequence] = []
        self.written = 0

    @rule(length=st.integers(1, 60))
    def admit(self, length: int) -> None:
        running = [(seq.tables, Demand(seq.num_known + 1, len(seq.content))) for seq in self.seqs]
        if self.kv.fits(Demand(length + 1, 0), [[] for _ in self.windows], running):
            seq = Sequence(self.kv.new_tables(), num_known=length)
            assert self.kv.allocate(seq.tables, 0, length) == []
            self.seqs.append(seq)

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0), rows=st.integers(1, 9))
    def compute(self, which: int, rows: int) -> None:
        """A step of a prompt always finds its blocks. A sequence after its prompt grows by a
        row.
        """
        seq = self.seqs[which % len(self.seqs)]
        left = seq.num_known - len(seq.content)
        self.kv.advance(seq.tables, len(seq.content), seq.num_known)
        rows = min(rows, self.kv.max_rows, left) if left else 1
        copies = self.kv.allocate(seq.tables, len(seq.content), rows)
        if copies is None:
            assert not left, "a sequence was admitted without its blocks"
            return
        self._copy(self.kv.slot_copies(copies))
        for _ in range(rows):
            self._write(seq)
        seq.num_known = max(seq.num_known, len(seq.content))

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0))
    def fork(self, which: int) -> None:
        seq = self.seqs[which % len(self.seqs)]
        if seq.num_known > len(seq.content):
            return
        self.seqs.append(Sequence(self.kv.fork(seq.tables), list(seq.content), seq.num_known))
        if self.kv.is_overcommitted:
            self.kv.free(self.seqs.pop().tables)
        assert not self.kv.is_overcommitted

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0), nodes=st.integers(1, 6), kept=st.sets(st.integers(0, 5)))
    def draft(self, which: int, nodes: int, kept: set[int]) -> None:
        """A row with a draft tree, of which one path is accepted."""
        seq = self.seqs[which % len(self.seqs)]
        nodes = min(nodes, self.kv.max_rows - 1)
        if seq.num_known > len(seq.content) or not nodes:
            return
        self.kv.advance(seq.tables, len(seq.content), seq.num_known)
        copies = self.kv.allocate(seq.tables, len(seq.content), 1 + nodes)
        if copies is None:
            return
        self._copy(self.kv.slot_copies(copies))
        self._write(seq)
        end, path = len(seq.content), sorted(node for node in kept if node < nodes)
        drafts = [self._write(seq) for _ in range(nodes)]
        self._copy(self.kv.keep_path(seq.tables, end, path))
        seq.content[end:] = [drafts[node] for node in path]
        seq.num_known = len(seq.content)

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0))
    def end(self, which: int) -> None:
        seq = self.seqs.pop(which % len(self.seqs))
        self.kv.free(seq.tables)
        assert not any(seq.tables)

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check([seq.tables for seq in self.seqs])
        for seq in self.seqs:
            for window, pool, table, memory in zip(
                self.windows, self.kv.pools, seq.tables, self.memory, strict=True
            ):
                first = max(0, len(seq.content) + 1 - window) if window else 0
                assert table.window_start * pool.block_size <= first
                for i in (*range(min(first, self.sinks)), *range(first, len(seq.content))):
                    assert memory[pool.slot(table, i)] == seq.content[i]
        for pool in self.kv.pools:
            assert pool.num_available <= pool.num_free
            if not self.seqs:
                assert pool.num_available == pool.num_blocks

    def _write(self, seq: Sequence) -> int:
        self.written += 1
        for pool, table, memory in zip(self.kv.pools, seq.tables, self.memory, strict=True):
            memory[pool.slot(table, len(seq.content))] = self.written
        seq.content.append(self.written)
        return self.written

    def _copy(self, copies: list[Copy]) -> None:
        for group, source, target in copies:
            self.memory[group][target] = self.memory[group].get(source, -1)


TestManager = Manager.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
