"""The prefix cache alone: what it finds, what it shares, and what it gives up first."""

import gc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kv.blocks import NULL_BLOCK, BlockPool
from headrace.kv.prefix import Node, PrefixCache, Scope

SCOPE = Scope()


def held(pool: BlockPool, cache: PrefixCache, known: list[int], scope: Scope = SCOPE) -> list[int]:
    """The table of a sequence that has come and computed all its tokens."""
    table: list[int] = []
    node = cache.find(scope, known, len(known))
    pool.share(table, node.path())
    assert pool.reserve(table, node.depth * pool.block_size, len(known) - node.depth * pool.block_size) == []
    cache.extend(node, table, known, len(known))
    return table


def test_finds_whole_blocks_of_equal_tokens() -> None:
    pool = BlockPool(16, 4)
    cache = PrefixCache(pool)
    table = held(pool, cache, list(range(10)))
    assert len(cache._nodes) == 2
    for known, most, blocks in [
        (list(range(10)), 10, 2),
        (list(range(8)), 8, 2),
        (list(range(8)), 7, 1),
        (list(range(7)), 7, 1),
        (list(range(3)), 3, 0),
        ([0, 1, 2, 3, 4, 5, 6, 9], 8, 1),
        ([9, 1, 2, 3, 4, 5, 6, 7], 8, 0),
        ([4, 5, 6, 7], 4, 0),
    ]:
        assert cache.find(SCOPE, known, most).path() == table[:blocks]


def test_other_salt_or_adapter_is_never_a_hit() -> None:
    pool = BlockPool(32, 2)
    cache = PrefixCache(pool)
    scopes = [Scope(salt, adapter) for salt in (None, "", "a", "b") for adapter in (None, "", "a")]
    tables = [held(pool, cache, [1, 2, 3, 4], scope) for scope in scopes]
    assert len({block for table in tables for block in table}) == 2 * len(scopes)
    assert [cache.find(scope, [1, 2, 3, 4], 4).path() for scope in scopes] == tables


def test_equal_blocks_become_one() -> None:
    pool = BlockPool(16, 4)
    cache = PrefixCache(pool)
    known = list(range(11))
    first: list[int] = []
    second: list[int] = []
    root = cache.find(SCOPE, known, 11)
    for table in (first, second):  # both have started before either was done
        pool.reserve(table, 0, 11)
    assert pool.num_free == 10
    cache.extend(root, first, known, 11)
    cache.extend(root, second, known, 11)
    assert first[:2] == second[:2] and first[2] != second[2]
    assert pool.num_free == 12
    pool.check([first, second])


def test_what_was_used_longest_ago_goes_first_leaves_before_all() -> None:
    pool = BlockPool(24, 1)
    cache = PrefixCache(pool)
    paths = [[i] * 8 for i in range(3)]
    for known in (*paths, paths[0]):  # the first is used again
        pool.free(held(pool, cache, known))
    assert pool.num_free == 24 and pool.num_evictable == 24
    table: list[int] = []
    pool.reserve(table, 0, 1)
    assert [cache.find(SCOPE, known, 8).depth for known in paths] == [8, 0, 8]
    pool.free(held(pool, cache, [2, 2]))  # the beginning of the third, again
    pool.reserve(table, 0, 8 + 1)
    assert [cache.find(SCOPE, known, 8).depth for known in paths] == [6, 0, 2]
    assert table[:8] == list(range(table[0], table[0] + 8))  # a run
    pool.check([table])


def test_a_scope_without_blocks_is_release_outside_windowtten() -> None:
    pool = BlockPool(2, 1)
    cache = PrefixCache(pool)
    gc.disable()
    try:
        for salt in map(str, range(100)):
            pool.free(held(pool, cache, [1, 2], Scope(salt)))
        assert len(cache._roots) == 1
    finally:
        gc.enable()


class Cache(RuleBasedStateMachine):
    """Sequences that hit, grow, fork, rewind and end. The model: what the KV in each slot was computed from."""

    @initialize(num_blocks=st.integers(1, 20), block_size=st.sampled_from([1, 2, 3]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = PrefixCache(self.pool)
        self.seqs: list[tuple[Scope, list[int], list[int], Node]] = []  # tokens, all computed, and table
        self.memory: dict[int, tuple[Scope, tuple[int, ...]]] = {}  # slot -> what its KV was computed from

    @rule(known=st.lists(st.integers(0, 1), max_size=12), salt=st.sampled_from([None, "a"]), spare=st.integers(0, 2))
    def new(self, known: list[int], salt: str | None, spare: int) -> None:
        scope, size = Scope(salt), self.pool.block_size
        node = self.cache.find(scope, known, len(known) - spare)
        assert node.depth * size <= max(0, len(known) - spare)
        table: list[int] = []
        self.pool.share(table, node.path())
        self._grow(scope, known[: node.depth * size], table, node, known[node.depth * size :])

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, which: int, tokens: list[int]) -> None:
        self._grow(*self.seqs.pop(which % len(self.seqs)), tokens)

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0))
    def fork(self, which: int) -> None:
        scope, known, table, node = self.seqs[which % len(self.seqs)]
        self.seqs.append((scope, list(known), list(self.pool.fork(table)), node))

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0), window=st.integers(1, 6))
    def release_outside_window(self, which: int, window: int) -> None:
        _, known, table, _ = self.seqs[which % len(self.seqs)]
        self.pool.release_outside_window(table, len(known) + 1 - window)

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0))
    def end(self, which: int) -> None:
        self.pool.free(self.seqs.pop(which % len(self.seqs))[2])

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([table for _, _, table, _ in self.seqs])
        for scope, known, table, _ in self.seqs:
            for i in range(table.count(NULL_BLOCK) * self.pool.block_size, len(known)):
                assert self.memory[self.pool.slot(table, i)] == (scope, tuple(known[: i + 1]))
            if NULL_BLOCK not in table:  # it holds its whole path, which everybody finds then
                depth = len(known) // self.pool.block_size
                assert self.cache.find(scope, known, len(known)).path() == table[:depth]

    def _grow(self, scope: Scope, known: list[int], table: list[int], node: Node, tokens: list[int]) -> None:
        """Compute `tokens`; the sequence ends where there is no room."""
        copies = self.pool.reserve(table, len(known), len(tokens))
        if copies is None:
            self.pool.free(table)
            return
        for source, target in self.pool.slots_of(copies):
            if source in self.memory:
                self.memory[target] = self.memory[source]
        for token in tokens:
            known.append(token)
            self.memory[self.pool.slot(table, len(known) - 1)] = (scope, tuple(known))
        node = self.cache.extend(node, table, known, len(known))
        self.seqs.append((scope, known, table, node))


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
