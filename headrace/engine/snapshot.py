"""What can be seen of the sequences and their blocks between two steps."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from headrace.config import KvConfig
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.kv.manager import KvManager
from headrace.program.kv import KvGroup
from headrace.stats import BlockMap, GroupMap, Holding, KvStats, SequenceStats


def kv_stats(
    seqs: Iterable[Sequence], kv: KvManager, groups: Iterable[KvGroup], config: KvConfig
) -> list[KvStats]:
    """The blocks of each group, and what of them these sequences leave empty."""
    stats = []
    for number, (group, pool) in enumerate(zip(groups, kv.pools, strict=True)):
        empty = _empty_slots(seqs, number, kv.block_size, lambda seq: seq.computed)
        beyond = _empty_slots(seqs, number, kv.block_size, lambda seq: len(seq.known))
        stats.append(
            KvStats(
                layers=len(group.layers),
                window=group.window,
                block_size=kv.block_size,
                block_bytes=group.block_bytes(config.dtype, kv.block_size),
                blocks_total=pool.num_blocks,
                blocks_free=pool.num_free,
                blocks_cached=pool.num_evictable,
                slots_empty=empty,
                slots_promised=empty - beyond,
            )
        )
    return stats


def _empty_slots(
    seqs: Iterable[Sequence], group: int, block_size: int, filled: Callable[[Sequence], int]
) -> int:
    """Slots beyond the first `filled(sequence)` in the blocks of these sequences; a shared block,
    filled alike for all, counts once.
    """
    empty: dict[int, int] = {}
    for seq in seqs:
        end, table = filled(seq), seq.tables[group]
        for i in range(max(end // block_size, table.window_start), len(table)):
            empty[table[i]] = min(block_size, (i + 1) * block_size - end)
    return sum(empty.values())


def block_map(seqs: Iterable[Sequence], kv: KvManager, groups: Iterable[KvGroup]) -> BlockMap:
    """Which sequence holds which block of KV now, for each KV group."""
    maps = []
    for number, (group, pool) in enumerate(zip(groups, kv.pools, strict=True)):
        holdings = [
            Holding(seq.request.id, seq.seq_id[1], seq.computed, list(seq.tables[number]))
            for seq in seqs
        ]
        maps.append(
            GroupMap(
                len(group.layers), group.window, pool.num_blocks, holdings, pool.evictable_blocks()
            )
        )
    return BlockMap(kv.block_size, maps)


def lines(scheduler: Scheduler, now: float) -> Iterator[SequenceStats]:
    """A line for each sequence: those that run and then those that wait, each in the order of
    rank.
    """
    return chain(
        (_line(seq, False, now) for seq in scheduler.running),
        (_line(seq, True, now) for seq in scheduler.waiting),
    )


def _line(seq: Sequence, waits: bool, now: float) -> SequenceStats:
    request = seq.request
    if waits:
        state = "waiting" if request.stopwatch.started is None else "preempted"
    elif seq.output.finish_reason:
        state = "padding"
    else:
        state = "decode" if seq.num_uncomputed == 1 and not request.pooling else "prefill"
    output = len(seq.output.token_ids)
    return SequenceStats(
        request.id,
        seq.seq_id[1],
        seq.prompt_len,
        output,
        request.cached_tokens,
        state,
        now - request.stopwatch.added,
    )
