"""Statistics of an engine: counts, recent rates, empty slots, and the block map."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import snapshot
from headrace.engine.meter import HISTORY, WINDOW, Meter
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.stats import GroupMap, SequenceStats
from tests.engine.test_scheduler import add, step
from tests.engine.toy import VOCAB, toy_engine
from tests.random_trees import RandomTrees
from tests.tiny import drain


class TestCounts:
    def test_stats_count_requests(self) -> None:
        engine = toy_engine()
        for _ in range(3):
            add(engine, 5, max_tokens=4)
        aborted = add(engine, 5)
        for refused in ([VOCAB], []):
            with pytest.raises(RequestError):
                engine.add_request(refused)
        stats = engine.stats()
        assert (stats.waiting, stats.running, stats.refused) == (4, 0, 2)
        step(engine)
        stats = engine.stats()
        assert (
            stats.waiting,
            stats.running,
            stats.rows_last,
            stats.tokens,
            stats.prompt_tokens,
        ) == (0, 4, 20, 4, 20)
        engine.abort(aborted)
        list(drain(engine))
        engine.abort(add(engine, 5))
        stats = engine.stats()
        assert (stats.finished, stats.aborted, stats.running, stats.tokens) == (3, 2, 0, 13)
        assert (
            stats.rows == 20 + 3 * 3
            and stats.rows_mean == stats.rows / stats.steps
            and stats.rows_last == 3
        )
        assert stats.step_seconds > 0 and stats.tokens_per_second > 0

    @pytest.mark.parametrize("params", [{}, {"n": 3}, {"beam_width": 3}, {"stop_token_ids": [7]}])
    def test_stats_count_tokens_of_streams_and_results(self, params: dict[str, Any]) -> None:
        said: list[int] = []
        for only_result in (False, True):
            engine = toy_engine(proposer=RandomTrees(0, VOCAB, {}, max_nodes=4))
            request_id = engine.add(
                engine.check([5, 6], SamplingParams(max_tokens=9, **params)),
                only_result=only_result,
            )
            updates = list(drain(engine))
            (result,) = [update.result for update in updates if update.result]
            assert updates[-1].result is result and {update.request_id for update in updates} == {
                request_id
            }
            assert len(updates) == 1 or not only_result
            said.append(engine.stats().tokens)
            assert said[-1] == sum(len(output.token_ids) for output in result.outputs)
        assert said[0] == said[1]

    def test_stats_of_an_idle_engine(self) -> None:
        stats = toy_engine().stats()
        assert (
            stats.waste
            == stats.rows_mean
            == stats.prefix_hit_rate
            == stats.acceptance_rate
            == stats.occupancy
            == 0
        )

    def test_stats_count_drafts(self) -> None:
        engine = toy_engine(proposer=RandomTrees(0, VOCAB, {}, max_nodes=4))
        add(engine, 3)
        list(drain(engine))
        stats = engine.stats()
        assert stats.drafted > 0 and stats.acceptance_rate == stats.accepted / stats.drafted


class TestMemory:
    def test_a_last_block_is_part_empty(self) -> None:
        engine = toy_engine(block_size=4, num_blocks=10)
        add(engine, 5)
        step(engine)
        stats = engine.stats()
        assert (stats.blocks_used, stats.kv[0].slots_empty, stats.occupancy, stats.waste) == (
            2,
            3,
            0.2,
            3 / 8,
        )

    def test_slots_of_known_tokens_are_no_fragmentation(self) -> None:
        engine = toy_engine(block_size=8, max_num_batched_tokens=3)
        add(engine, 6)
        step(
            engine
        )  # three of six tokens are read: the block has three slots for the others, and two beyond
        stats = engine.stats()
        (kv,) = stats.kv
        assert (kv.slots_empty, kv.slots_promised, stats.waste, stats.fragmentation) == (
            5,
            3,
            5 / 8,
            2 / 8,
        )

    def test_a_shared_block_counts_once(self) -> None:
        engine = toy_engine(block_size=4)
        add(engine, 6, n=3, temperature=1.0, seed=1)
        step(engine)
        stats, (blocks,) = engine.stats(), engine.block_map().groups
        assert (stats.running, stats.blocks_used, stats.kv[0].slots_empty) == (3, 2, 2)
        assert [(h.request, h.seq, h.computed) for h in blocks.holdings] == [
            ("0", i, 6) for i in range(3)
        ]
        assert blocks.holdings[0].blocks == blocks.holdings[1].blocks == blocks.holdings[2].blocks
        step(engine)  # each has a last block of its own now
        stats = engine.stats()
        assert (stats.blocks_used, stats.kv[0].slots_empty) == (4, 3)

    def test_the_map_of_two_groups(self) -> None:
        """Nine tokens in blocks of four; a window of five sees no token of the first block. Blocks
        of an ended sequence are still cached.
        """
        engine = toy_engine(block_size=4, num_blocks=20, windows=(0, 5))
        add(engine, 4, max_tokens=1)
        step(engine)
        engine.add_request([9] * 8, SamplingParams(max_tokens=9, seed=1))
        step(engine)
        step(engine)
        blocks = engine.block_map()
        assert blocks.block_size == 4
        (table, seen), (cached, also_cached) = (
            [group.holdings[0].blocks for group in blocks.groups],
            [group.cached for group in blocks.groups],
        )
        assert [group._replace(holdings=[], cached=()) for group in blocks.groups] == [
            GroupMap(1, 0, 20, []),
            GroupMap(1, 5, 20, []),
        ]
        assert [group.holdings[0][:3] for group in blocks.groups] == [("1", 0, 9)] * 2
        assert len(table) == 3 and seen[0] == -1 and min(table + seen[1:]) >= 0
        assert (
            len(cached) == 1 and not set(cached) & set(table) and not set(also_cached) & set(seen)
        )
        assert len(also_cached) == 2  # of the first request, and released by the second
        assert [(kv.layers, kv.window, kv.blocks_cached) for kv in engine.stats().kv] == [
            (1, 0, 1),
            (1, 5, 2),
        ]

    @settings(deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 3)),
            min_size=1,
            max_size=5,
        ),
        st.integers(1, 12),
        st.sampled_from([(0,), (0, 4), (6, 3)]),
    )
    def test_empty_slots_are_what_the_map_leaves_empty(
        self, requests: list[tuple[int, int, int]], steps: int, windows: tuple[int, ...]
    ) -> None:
        engine = toy_engine(
            num_blocks=40, max_num_seqs=4, max_num_batched_tokens=20, windows=windows
        )
        for prompt_len, max_tokens, n in requests:
            add(engine, prompt_len, max_tokens=max_tokens, n=n, temperature=1.0, seed=n)
        for _ in range(steps):
            engine.step()
            stats, blocks = engine.stats(), engine.block_map()
            assert stats.fragmentation <= stats.waste
            for kv, group in zip(stats.kv, blocks.groups, strict=True):
                filled = filled_slots(group, blocks.block_size)
                assert kv.blocks_used == len(filled)
                assert kv.slots_empty == kv.blocks_used * kv.block_size - sum(
                    map(len, filled.values())
                )
                assert 0 <= kv.slots_promised <= kv.slots_empty


def filled_slots(group: GroupMap, block_size: int) -> dict[int, set[int]]:
    """Return the slots with KV in each block."""
    filled: dict[int, set[int]] = {
        block: set() for holding in group.holdings for block in holding.blocks if block >= 0
    }
    for holding in group.holdings:
        for i in range(holding.computed):
            if (block := holding.blocks[i // block_size]) >= 0:
                filled[block].add(i % block_size)
    return filled


class TestLines:
    def test_sequence_stats_states(self) -> None:
        engine = toy_engine(num_blocks=7, block_size=4, max_num_batched_tokens=10)
        add(engine, 8, max_tokens=12)
        add(engine, 8, max_tokens=12)
        add(engine, 1)
        scheduler = engine._scheduler
        step(engine)
        assert [
            (line.request, line.prompt, line.output, line.state)
            for line in snapshot.sequence_stats(scheduler, 0.0)
        ] == [
            ("0", 8, 1, "decode"),
            ("1", 8, 0, "prefill"),
            ("2", 1, 0, "waiting"),
        ]
        while not engine.stats().preemptions:
            step(engine)
        assert [line.state for line in snapshot.sequence_stats(scheduler, 0.0)] == [
            "decode",
            "decode",  # the third passes
            "preempted",
        ]

    def test_sequence_stats_of_one_sequence(self) -> None:
        now = [5.0]
        engine = toy_engine(block_size=4, clock=lambda: now[0])
        engine.add_request([1] * 9, SamplingParams(max_tokens=1))
        step(engine)
        now[0] = 7.0
        engine.add_request(
            [1] * 9 + [2], SamplingParams(n=2, seed=1, max_tokens=9), request_id="two"
        )
        step(engine)
        engine.add_request([3] * 6, request_id="late")
        first = SequenceStats(
            request="two", seq=0, prompt=10, output=1, cached=8, state="decode", age=3.5
        )
        late = SequenceStats(
            request="late", seq=0, prompt=6, output=0, cached=0, state="waiting", age=3.5
        )
        assert list(snapshot.sequence_stats(engine._scheduler, 10.5)) == [
            first,
            first._replace(seq=1),
            late,
        ]

    def test_sequence_stats_of_padding(self) -> None:
        engine = toy_engine(batching="static")
        add(engine, 2, max_tokens=1)
        add(engine, 2, max_tokens=5)
        step(engine)
        assert [line.state for line in snapshot.sequence_stats(engine._scheduler, 0.0)] == [
            "padding",
            "decode",
        ]


class TestMeter:
    @staticmethod
    def steady(
        start: float, seconds: float, rate: int
    ) -> Iterator[tuple[float, float, int, int, int]]:
        """Return steps of 10 ms with a constant rate of tokens."""
        for i in range(round(100 * seconds)):
            yield start + i / 100, start + (i + 1) / 100, rate // 100, i + 1, 1

    def test_meter_of_a_steady_rate(self) -> None:
        meter = Meter(100.0)
        for one in self.steady(100.0, 20, 800):
            meter.record(*one)
        tokens, rows = meter.rates(120.0)
        assert tokens == pytest.approx(800) and rows == pytest.approx(100)
        assert meter.history(120.0) == pytest.approx([0] * (HISTORY - 20) + [800] * 20)

    def test_meter_of_a_young_engine(self) -> None:
        meter = Meter(0.0)
        for one in self.steady(0.0, 1, 800):
            meter.record(*one)
        assert meter.rates(1.0)[0] == pytest.approx(800)
        assert Meter(5.0).rates(5.0) == (0.0, 0.0)

    def test_meter_counts_idle_time(self) -> None:
        meter = Meter(0.0)
        for one in [*self.steady(0.0, 10, 800), *self.steady(1000.0, 1, 800)]:
            meter.record(*one)
        assert meter.rates(1001.0)[0] == pytest.approx(800 / WINDOW, rel=0.02)
        assert meter.rates(2000.0) == (0.0, 0.0) and not any(meter.history(2000.0))
        assert (
            meter.history(1001.0)[-1] == pytest.approx(800, rel=0.02)
            and meter.history(1001.0)[-2] < 1
        )

    def test_meter_history_is_in_tenths(self) -> None:
        meter = Meter(0.0)
        meter.record(0.0, 3.0, 5, 1, 1)
        assert meter.history(3.0)[-3:] == [1.7, 1.7, 1.7]

    def test_meter_of_several_steps_at_once(self) -> None:
        meter = Meter(1.0)
        assert (meter.rows_last, meter.step_seconds) == (0, 0.0)
        meter.record(1.0, 2.0, 4, 8, 4)
        meter.record(3.0, 5.0, 4, 20, 4)
        assert (meter.rows_last, meter.step_seconds) == (3, 0.5) and isinstance(
            meter.rows_last, int
        )

    def test_meter_history_covers_a_minute(self) -> None:
        """One token in the first of the last 60 seconds, and none after it, in any number of
        steps.
        """
        meter = Meter(0.0)
        for tenth in range(1000):
            meter.record(tenth / 10, (tenth + 1) / 10, int(400 <= tenth < 410), tenth + 1, 1)
        assert meter.history(100.0) == pytest.approx([10] + [0] * (HISTORY - 1))

    def test_meter_memory_is_bounded(self) -> None:
        meter = Meter(0.0)
        for second in range(10_000):
            meter.record(second, second + 0.5, 1, second, 1)
        assert len(meter._marks) <= 2 * (HISTORY + WINDOW) + 1
