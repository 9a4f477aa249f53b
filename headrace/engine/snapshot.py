"""Statistics of the sequences and their blocks."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from headrace.config import KvConfig
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Request, Sequence
from headrace.kv.manager import KvManager
from headrace.program.kv import KvGroup
from headrace.stats import BlockMap, GroupMap, Holding, KvStats, SequenceStats


def kv_stats(
    seqs: Iterable[Sequence], kv: KvManager, groups: Iterable[KvGroup], config: KvConfig
) -> list[KvStats]:
    stats = []
    for number, (group, pool) in enumerate(zip(groups, kv.pools, strict=True)):
        empty = _empty_slots(seqs, number, kv.block_size, lambda seq: seq.computed)
        never_filled = _empty_slots(seqs, number, kv.block_size, lambda seq: len(seq.known))
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
                slots_promised=empty - never_filled,
            )
        )
    return stats


def _empty_slots(
    seqs: Iterable[Sequence], group: int, block_size: int, filled: Callable[[Sequence], int]
) -> int:
    """Count the slots after the first `filled(sequence)`. A shared block counts once."""
    empty: dict[int, int] = {}
    for seq in seqs:
        end, table = filled(seq), seq.tables[group]
        for index in range(max(end // block_size, table.window_start), len(table)):
            empty[table[index]] = min(block_size, (index + 1) * block_size - end)
    return sum(empty.values())


def grammar_bytes(requests: Iterable[Request]) -> int:
    return sum(
        seq.constraint.num_bytes
        for request in requests
        for seq in request.seqs
        if seq.constraint is not None
    )


def block_map(seqs: Iterable[Sequence], kv: KvManager, groups: Iterable[KvGroup]) -> BlockMap:
    maps = []
    for number, (group, pool) in enumerate(zip(groups, kv.pools, strict=True)):
        holdings = [
            Holding(
                request=seq.request.id,
                seq=seq.seq_id[1],
                computed=seq.computed,
                blocks=list(seq.tables[number]),
            )
            for seq in seqs
        ]
        maps.append(
            GroupMap(
                layers=len(group.layers),
                window=group.window,
                num_blocks=pool.num_blocks,
                holdings=holdings,
                cached=pool.evictable_blocks(),
            )
        )
    return BlockMap(kv.block_size, maps)


def sequence_stats(scheduler: Scheduler, now: float) -> Iterator[SequenceStats]:
    return chain(
        (_stats_of(seq, _running_state(seq), now) for seq in scheduler.running),
        (_stats_of(seq, _waiting_state(seq), now) for seq in scheduler.waiting),
    )


def _running_state(seq: Sequence) -> str:
    if seq.output.finish_reason:
        return "padding"
    is_decoding = seq.num_uncomputed == 1 and seq.request.samples
    return "decode" if is_decoding else "prefill"


def _waiting_state(seq: Sequence) -> str:
    return "waiting" if seq.request.timer.started is None else "preempted"


def _stats_of(seq: Sequence, state: str, now: float) -> SequenceStats:
    request = seq.request
    return SequenceStats(
        request=request.id,
        seq=seq.seq_id[1],
        prompt=seq.prompt_len,
        output=len(seq.output.token_ids),
        cached=request.cached_tokens,
        state=state,
        age=now - request.timer.added,
    )
