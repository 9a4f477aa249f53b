"""The host tier alone: saving, dropping and loading copies without losing, doubling or confusing
them.
"""

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from headrace.batch import Ints
from headrace.config import KvConfig
from headrace.kv.blocks import NULL_BLOCK
from headrace.kv.host import HostTier
from headrace.kv.manager import BlockCopy, KvManager
from headrace.kv.prefix import Hit, PrefixCache, Scope
from headrace.kv.rows import prepare_blocks
from tests.engine.toy import toy_groups, toy_kv
from tests.kv.test_prefix import SCOPE, Cache, held


class Store:
    """Records and makes the copies. `memory` has the tokens that the KV of each slot was computed
    from.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, block_size: int = 1) -> None:
        self.num_blocks, self.block_bytes, self.block_seconds = (
            (num_blocks,) * num_groups,
            (10,) * num_groups,
            0.0,
        )
        self.memory: list[dict[int, tuple[Scope, tuple[int, ...]]]] = [
            {} for _ in range(num_groups)
        ]
        self.copies: dict[tuple[int, int], list[tuple[Scope, tuple[int, ...]] | None]] = {}
        self.saved: list[tuple[int, int, int]] = []
        self.loaded: list[tuple[int, int, int]] = []
        self.memory_for = num_blocks
        self._size = block_size

    def save(self, group: int, block: int, host_block: int) -> None:
        if host_block >= self.memory_for:
            raise MemoryError
        self.saved.append((group, block, host_block))
        self.copies[group, host_block] = [
            self.memory[group].get(block * self._size + i) for i in range(self._size)
        ]

    def load(self, group: int, host_block: int, block: int) -> None:
        self.loaded.append((group, host_block, block))
        for i, what in enumerate(self.copies[group, host_block]):
            assert what is not None or not self.memory[group], (
                "a block was copied that nothing had filled"
            )
            if what:
                self.memory[group][block * self._size + i] = what


def gone(host_block: int) -> None:
    raise AssertionError(f"{host_block} is gone")


def offloading(
    num_blocks: int, block_size: int, host_blocks: int, windows: tuple[int, ...] = (0,)
) -> tuple[KvManager, PrefixCache, Store]:
    store = Store(host_blocks, len(windows), block_size)
    config = KvConfig((num_blocks,) * len(windows), block_size)
    kv = KvManager(toy_groups(windows), config, 512, HostTier(store, block_size))
    return kv, PrefixCache(kv), store


class TestTier:
    def test_host_tier_drops_the_least_recently_used_copy(self) -> None:
        tier, went = HostTier(store := Store(3), 4), list[int]()
        assert [tier.save(0, block, went.append) for block in (7, 8, 9)] == [
            0,
            1,
            2,
        ] and tier.num_bytes == 30
        tier.touch(0, 0)
        assert tier.save(0, 5, went.append) == 1 and went == [1]
        tier.free(0, 2)
        assert tier.save(0, 6, went.append) == 2 and went == [1]
        assert (
            store.saved == [(0, 7, 0), (0, 8, 1), (0, 9, 2), (0, 5, 1), (0, 6, 2)]
            and tier.num_saved == 5
        )
        tier.check()

    def test_host_tier_keeps_pinned_copies_until_they_are_loaded(self) -> None:
        tier, went = HostTier(store := Store(1), 4), list[int]()
        assert tier.save(0, 7, went.append) == 0
        tier.pin(0, 0)
        assert tier.save(0, 8, gone) == NULL_BLOCK
        tier.queue_load(0, 0, 3)
        assert store.loaded == []
        tier.run_loads()
        tier.run_loads()
        assert store.loaded == [(0, 0, 3)] and tier.num_loaded == 1 and len(store.saved) == 1
        assert tier.save(0, 8, gone) == 0 and went == [0]

    @pytest.mark.parametrize(("seconds", "is_faster"), [(0.05, True), (0.15, False)])
    def test_host_tier_is_used_only_if_loading_is_faster(
        self, seconds: float, is_faster: bool
    ) -> None:
        """Four tokens of 30 ms each: the fastest step had ten rows in 0.3 s."""
        tier = HostTier(store := Store(2), 4)
        store.block_seconds = seconds
        assert tier.is_faster  # before the first step
        for rows, took in ((1, 0.2), (10, 0.3), (2, 1.0)):
            tier.record(rows, took)
        assert tier.is_faster == is_faster and (tier.save(0, 1, gone) == 0) == is_faster

    def test_host_tier_works_with_less_memory_than_planned(self) -> None:
        tier, went = HostTier(store := Store(9), 4), list[int]()
        store.memory_for = 2
        assert [tier.save(0, block, went.append) for block in range(5)] == [
            0,
            1,
            NULL_BLOCK,
            0,
            1,
        ] and went == [0, 1]
        tier.check()

    def test_host_tier_without_a_store_is_empty(self) -> None:
        tier = HostTier()
        assert not tier.is_faster and tier.save(0, 1, gone) == NULL_BLOCK and tier.num_bytes == 0
        tier.run_loads()
        tier.check()


def shared(kv: KvManager, cache: PrefixCache, known: list[int]) -> Hit:
    """Start a sequence with its prefix hit, load its blocks, and end it."""
    node, tables = cache.match(SCOPE, known, len(known)), kv.new_tables()
    hit = Hit(node, cache.blocks(node), node.depth * kv.block_size)
    cache.share(hit, tables)
    kv.check([tables])
    kv.host.run_loads()
    kv.free(tables)
    return hit


def test_block_copies_come_before_loads() -> None:
    """The loaded block overwrites a block that a copy still reads, for example of a preempted
    sequence.
    """
    kv, cache, store = offloading(4, 1, 8)
    kv.free(held(kv, cache, [1]))
    kv.free(held(kv, cache, [9] * 4))
    tables = kv.new_tables()
    node = cache.match(SCOPE, [1], 1)
    cache.share(Hit(node, cache.blocks(node), 1), tables)
    (block,) = tables[0]
    reads: list[tuple[list[int], int]] = []

    class Executable:
        def move_slots(self, group: int, source: Ints, target: Ints) -> None:
            reads.append((source.tolist(), len(store.loaded)))

    prepare_blocks(Executable(), kv, [BlockCopy(0, block, 3, num_slots=1)])  # type: ignore[arg-type]
    assert reads == [([block], 0)] and len(store.loaded) == 1


class TestTree:
    def test_an_evicted_prefix_is_loaded_once(self) -> None:
        kv, cache, store = offloading(4, 2, 8)
        kv.free(held(kv, cache, [1, 2, 3, 4]))
        kv.free(held(kv, cache, [9] * 8))
        assert [block for _, block, _ in store.saved] == [1, 0]  # the end first
        assert [
            hit.num_tokens
            for hit in (shared(kv, cache, [1, 2, 3, 4]), shared(kv, cache, [1, 2, 3, 4]))
        ] == [4, 4]
        assert [host for _, host, _ in store.loaded] == [1, 0] and len(
            {block for *_, block in store.loaded}
        ) == 2
        kv.free(held(kv, cache, [8] * 8))  # the copies are still there
        assert (
            len(store.saved) == len(set(store.saved)) == 2 + 4
            and shared(kv, cache, [1, 2, 3, 4]).num_tokens == 4
        )

    def test_loading_does_not_evict_blocks_of_the_same_prefix(self) -> None:
        """The last eight of ten blocks were evicted. The first two are the oldest evictable blocks
        when all ten are needed.
        """
        kv, cache, store = offloading(16, 1, 20)
        known = list(range(10))
        kv.free(held(kv, cache, known))
        kv.free(held(kv, cache, [20] * 7))
        assert len(store.saved) == 8
        assert shared(kv, cache, known).blocks == [[0, 1] + [NULL_BLOCK] * 8]
        assert len(store.saved) == 8 + 7 and len(store.loaded) == 8

    def test_copies_are_ignored_if_loading_is_slower(self) -> None:
        kv, cache, store = offloading(2, 2, 8)
        kv.free(held(kv, cache, [1, 2, 3, 4]))
        kv.free(held(kv, cache, [9] * 4))
        store.block_seconds = inf
        assert cache.match(SCOPE, [1, 2, 3, 4], 4).depth == 0
        kv.free(held(kv, cache, [1, 2, 3, 4]))  # computed again, in blocks of the same nodes
        assert cache.match(SCOPE, [1, 2, 3, 4], 4).depth == 2 and len(store.saved) == 2
        kv.check([])

    def test_a_window_loads_only_visible_blocks(self) -> None:
        kv, cache, store = offloading(12, 2, 24, (0, 4))
        known = list(range(24))
        tables = held(kv, cache, known)
        kv.advance(tables, 24, 24)
        kv.free(tables)
        kv.free(held(kv, cache, [30] * 24))
        assert len(store.saved) == 24
        hit = shared(kv, cache, known)
        assert hit.num_tokens == 24 and [group for group, *_ in store.loaded] == [0] * 12 + [1] * 2

    def test_copies_that_no_hit_can_reach_are_dropped(self) -> None:
        kv, cache, _ = offloading(2, 2, 2, (0, 4))
        kv.free(held(kv, cache, [1, 2, 3, 4]))
        for first in range(5, 9):
            kv.free(held(kv, cache, [first, 2, 3, 4]))
            kv.check([])
            for group, nodes in enumerate(cache._host_nodes):
                assert nodes.keys() == kv.host._used[group].keys()
                assert all(
                    node.blocks[0] != NULL_BLOCK or node.host_blocks[0] != NULL_BLOCK
                    for node in nodes.values()
                )
        kv.reset()
        assert kv.host.num_bytes == 0


class Offload(Cache):
    """The prefix cache machine with a host tier that is faster at times and slower at others."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 3]),
        windows=st.sampled_from([(0,), (0,), (0, 3), (0, 2, 7), (4,), (0, 0), (3, 0)]),
        sinks=st.sampled_from([0, 0, 1, 4]),
        host_blocks=st.sampled_from([1, 3, 10, 60]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int, ...],
        sinks: int,
        host_blocks: int,
    ) -> None:
        self.windows, self.sinks = windows, sinks
        self.store = Store(host_blocks, len(windows), block_size)
        self.kv = toy_kv(
            num_blocks,
            block_size,
            windows,
            max_rows=12,
            sinks=sinks,
            host=HostTier(self.store, block_size),
        )
        self.cache = PrefixCache(self.kv)
        self.seqs = []
        self.memory = self.store.memory

    @precondition(lambda self: hasattr(self, "kv"))
    @rule(seconds=st.sampled_from([0.0, 0.0, inf]))
    def change_speed(self, seconds: float) -> None:
        self.store.block_seconds = seconds

    @invariant()
    def every_copy_is_of_one_node_and_right(self) -> None:
        if not hasattr(self, "kv"):
            return
        host = self.kv.host
        for group, nodes in enumerate(self.cache._host_nodes):
            assert nodes.keys() == host._used[group].keys() and len(set(nodes.values())) == len(
                nodes
            )
            for host_block, node in nodes.items():
                assert node.host_blocks[group] == host_block
                if (block := node.blocks[group]) != NULL_BLOCK:
                    own = [
                        self.memory[group].get(block * self.kv.block_size + i)
                        for i in range(self.kv.block_size)
                    ]
                    assert own == self.store.copies[group, host_block]
        assert host.num_saved == len(self.store.saved) and host.num_loaded == len(self.store.loaded)

    def _kept(self) -> list[set[tuple[Scope, tuple[int, ...]]]]:
        kept = super()._kept()
        if self.kv.host.is_faster:
            for group, nodes in enumerate(self.cache._host_nodes):
                kept[group] |= {
                    copy for block in nodes if (copy := self.store.copies[group, block][-1])
                }
        return kept


TestOffload = Offload.TestCase
TestOffload.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
