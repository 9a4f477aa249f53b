"""The prefix cache alone: matching, sharing, and eviction."""

import gc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kv.blocks import NULL_BLOCK, Demand
from headrace.kv.manager import KvManager, Tables
from headrace.kv.prefix import Hit, Node, PrefixCache, Scope
from tests.engine.toy import toy_kv

SCOPE = Scope()


def held(kv: KvManager, cache: PrefixCache, known: list[int], scope: Scope = SCOPE) -> Tables:
    """Start a sequence, compute all its tokens, and return its tables."""
    tables = kv.new_tables()
    node = cache.match(scope, known, len(known))
    kv.share(tables, cache.blocks(node))
    assert (
        kv.allocate(tables, node.depth * kv.block_size, len(known) - node.depth * kv.block_size)
        == []
    )
    cache.insert(node, tables, known, len(known))
    return tables


def path(cache: PrefixCache, known: list[int], most: int, scope: Scope = SCOPE) -> list[int]:
    """Return the blocks of the hit in the first group."""
    return cache.blocks(cache.match(scope, known, most))[0]


def test_match_finds_whole_blocks_of_equal_tokens() -> None:
    kv = toy_kv(16, 4)
    cache = PrefixCache(kv)
    (table,) = held(kv, cache, list(range(10)))
    assert len(cache._nodes[0]) == 2
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
        assert path(cache, known, most) == list(table[:blocks])


def test_other_salt_or_adapter_is_never_a_hit() -> None:
    kv = toy_kv(32, 2)
    cache = PrefixCache(kv)
    scopes = [Scope(salt, adapter) for salt in (None, "", "a", "b") for adapter in (None, "", "a")]
    tables = [list(held(kv, cache, [1, 2, 3, 4], scope)[0]) for scope in scopes]
    assert len({block for table in tables for block in table}) == 2 * len(scopes)
    assert [path(cache, [1, 2, 3, 4], 4, scope) for scope in scopes] == tables


def test_a_node_whose_blocks_were_evicted_takes_new_ones() -> None:
    kv = toy_kv(4, 4, (0, 6))
    cache, known = PrefixCache(kv), list(range(8))
    kv.free(held(kv, cache, known))
    node, other = (
        cache.match(SCOPE, known, 8),
        kv.new_tables(),
    )  # a sequence may hold the node for long
    assert NULL_BLOCK not in node.blocks
    assert kv.allocate(other, 0, 16) == []
    assert node.blocks == [NULL_BLOCK, NULL_BLOCK] and not any(path(cache, known, 8))
    kv.free(other)
    again = held(kv, cache, known)
    assert cache.match(SCOPE, known, 8) is node and node.blocks == [table[1] for table in again]
    kv.check([again])


def test_equal_blocks_become_one() -> None:
    kv = toy_kv(16, 4, (0, 6))
    cache = PrefixCache(kv)
    known = list(range(11))
    both = [kv.new_tables(), kv.new_tables()]
    root = cache.match(SCOPE, known, 11)
    for tables in both:  # both have started before either was done
        kv.allocate(tables, 0, 11)
    assert [pool.num_free for pool in kv.pools] == [10, 10]
    for tables in both:
        cache.insert(root, tables, known, 11)
    for first, second in zip(*both, strict=True):
        assert first[:2] == second[:2] and first[2] != second[2]
    assert [pool.num_free for pool in kv.pools] == [12, 12]
    kv.check(both)


def test_eviction_is_least_recently_used_and_leaves_first() -> None:
    kv = toy_kv(24, 1)
    cache, (pool,) = PrefixCache(kv), kv.pools
    paths = [[i] * 8 for i in range(3)]
    for known in (*paths, paths[0]):  # the first is used again
        kv.free(held(kv, cache, known))
    assert pool.num_free == 24 and pool.num_evictable == 24
    tables = kv.new_tables()
    kv.allocate(tables, 0, 1)
    assert [cache.match(SCOPE, known, 8).depth for known in paths] == [8, 0, 8]
    kv.free(held(kv, cache, [2, 2]))  # the beginning of the third, again
    kv.allocate(tables, 0, 8 + 1)
    assert [cache.match(SCOPE, known, 8).depth for known in paths] == [6, 0, 2]
    (table,) = tables
    assert list(table[:8]) == list(range(table[0], table[0] + 8))  # a run
    kv.check([tables])


def test_a_scope_without_blocks_is_forgotten() -> None:
    kv = toy_kv(2, 1)
    cache = PrefixCache(kv)
    gc.disable()
    try:
        for salt in map(str, range(100)):
            kv.free(held(kv, cache, [1, 2], Scope(salt)))
        assert len(cache._roots) == 1 and len(cache._children) == 2
    finally:
        gc.enable()


def test_a_hit_needs_only_visible_blocks() -> None:
    """The window has moved to the last of twelve blocks. Most blocks before it were evicted, and
    are not needed.
    """
    kv = toy_kv(12, 2, (0, 4))  # a row after a block boundary sees the two blocks before it
    cache, (full, windowed) = PrefixCache(kv), kv.pools
    known = list(range(24))
    tables, other = held(kv, cache, known), kv.new_tables()
    kv.advance(tables, 24, 24)
    kv.free(tables)
    windowed.allocate(other[1], 0, 1)  # evicts a run of blocks, the first released first
    blocks = cache.blocks(cache.match(SCOPE, known, 24))
    assert (
        len(blocks[0]) == len(blocks[1]) == 12
        and [block == NULL_BLOCK for block in blocks[1]] == [True] * 10 + [False] * 2
    )
    assert [cache.match(SCOPE, known, 2 * depth).depth for depth in range(13)] == [0] * 10 + [
        10,
        11,
        12,
    ]
    kv.free(other)
    full.allocate(
        other[0], 0, 2 * 12
    )  # without a block that all rows see the others of its node are of no use
    assert (
        windowed.num_evictable == 0
        and not cache._nodes[1]
        and cache.match(SCOPE, known, 24).depth == 0
    )


def test_a_hit_needs_the_attention_sinks() -> None:
    """The row after twelve blocks sees the first two and the last two; without the second there is
    no hit.
    """
    kv = toy_kv(12, 2, (4,), sinks=3)
    cache, (pool,) = PrefixCache(kv), kv.pools
    known = list(range(24))
    tables = held(kv, cache, known)
    kv.advance(tables, 24, 24)
    second = tables[0][1]
    kv.free(tables)
    (blocks,) = cache.blocks(cache.match(SCOPE, known, 24))
    assert [block == NULL_BLOCK for block in blocks] == [False] * 2 + [True] * 8 + [False] * 2
    kv.share(tables := kv.new_tables(), [blocks])
    assert (tables[0].num_released, tables[0].window_start, tables[0].num_held) == (8, 10, 4)
    kv.check([tables])
    kv.free(tables)
    pool.uncache(second)
    cache._evicted(0, second)
    assert cache.match(SCOPE, known, 24).depth == 1


class Cache(RuleBasedStateMachine):
    """Sequences hit, grow, fork, continue and end, checked against the tokens that the KV of each
    slot was computed from.
    """

    @initialize(
        num_blocks=st.integers(1, 20),
        block_size=st.sampled_from([1, 2, 3]),
        windows=st.sampled_from([(0,), (0, 3), (0, 2, 7), (4,), (2, 5), (3, 0)]),
        sinks=st.sampled_from([0, 0, 1, 4]),
    )
    def start(self, num_blocks: int, block_size: int, windows: tuple[int, ...], sinks: int) -> None:
        self.windows, self.sinks = windows, sinks
        self.kv = toy_kv(num_blocks, block_size, windows, max_rows=12, sinks=sinks)
        self.cache = PrefixCache(self.kv)
        self.seqs: list[
            tuple[Scope, list[int], Tables, Node]
        ] = []  # tokens, all computed, and tables
        self.memory: list[dict[int, tuple[Scope, tuple[int, ...]]]] = [
            {} for _ in windows
        ]  # slot -> the tokens that its KV was computed from

    @rule(
        known=st.lists(st.integers(0, 1), max_size=12),
        salt=st.sampled_from([None, "a"]),
        spare=st.integers(0, 2),
    )
    def new(self, known: list[int], salt: str | None, spare: int) -> None:
        scope, size = Scope(salt), self.kv.block_size
        node = self.cache.match(scope, known, len(known) - spare)
        assert node.depth == self._longest_hit(scope, known, max(0, len(known) - spare))
        hit, tables = Hit(node, self.cache.blocks(node), node.depth * size), self.kv.new_tables()
        if any(pool.max_blocks(Demand(len(known))) > pool.num_available for pool in self.kv.pools):
            return
        self.cache.share(hit, tables)
        self._grow(scope, known[: node.depth * size], tables, node, known[node.depth * size :])

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, which: int, tokens: list[int]) -> None:
        self._grow(*self.seqs.pop(which % len(self.seqs)), tokens)

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0))
    def fork(self, which: int) -> None:
        scope, known, tables, node = self.seqs[which % len(self.seqs)]
        self.seqs.append((scope, list(known), self.kv.fork(tables), node))
        while self.kv.is_overcommitted:
            self.kv.free(self.seqs.pop()[2])

    @precondition(lambda self: self.seqs)
    @rule(which=st.integers(0))
    def end(self, which: int) -> None:
        self.kv.free(self.seqs.pop(which % len(self.seqs))[2])

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check([tables for _, _, tables, _ in self.seqs])
        for scope, known, tables, _ in self.seqs:
            for pool, table, memory in zip(self.kv.pools, tables, self.memory, strict=True):
                for i in [
                    i for i in range(len(known)) if table[i // pool.block_size] != NULL_BLOCK
                ]:
                    assert memory[pool.slot(table, i)] == (scope, tuple(known[: i + 1]))
            depth = len(known) // self.kv.block_size
            assert self.cache.match(scope, known, len(known)).depth == self._longest_hit(
                scope, known, len(known)
            )
            if not any(self.windows):  # it holds its whole path, which every search finds then
                assert self.cache.blocks(self.cache.match(scope, known, len(known)))[0] == list(
                    tables[0][:depth]
                )

    def _kept(self) -> list[set[tuple[Scope, tuple[int, ...]]]]:
        """Return the tokens that the cached blocks of each group were computed from."""
        size = self.kv.block_size
        return [
            {memory[block * size + size - 1] for block in nodes}
            for nodes, memory in zip(self.cache._nodes, self.memory, strict=True)
        ]

    def _longest_hit(self, scope: Scope, known: list[int], most: int) -> int:
        """Return the hit in blocks, by brute force: each group must have every token that the row
        after the hit sees.
        """
        size, kept = self.kv.block_size, self._kept()

        def is_hit(depth: int) -> bool:
            first = [
                max(0, depth * size + 1 - window) // size if window else 0
                for window in self.windows
            ]
            sinks = -(-self.sinks // size)
            return all(
                (scope, tuple(known[: (i + 1) * size])) in have
                for have, begin in zip(kept, first, strict=True)
                for i in (*range(min(sinks, begin)), *range(begin, depth))
            )

        return next(depth for depth in range(most // size, -1, -1) if is_hit(depth))

    def _grow(
        self, scope: Scope, known: list[int], tables: Tables, node: Node, tokens: list[int]
    ) -> None:
        """Compute `tokens`; the sequence ends if there are not enough blocks."""
        self.kv.advance(tables, len(known), len(known))
        copies = self.kv.allocate(tables, len(known), len(tokens))
        for group, source, target in self.kv.slot_copies(copies or []):
            if source in self.memory[group]:
                self.memory[group][target] = self.memory[group][source]
        self.kv.host.run_loads()
        if copies is None:
            self.kv.free(tables)
            return
        for token in tokens:
            known.append(token)
            for pool, table, memory in zip(self.kv.pools, tables, self.memory, strict=True):
                memory[pool.slot(table, len(known) - 1)] = (scope, tuple(known))
        node = self.cache.insert(node, tables, known, len(known))
        self.seqs.append((scope, known, tables, node))


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
