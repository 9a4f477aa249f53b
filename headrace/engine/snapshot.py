"""What can be seen of the sequences and their blocks between two steps."""

from collections.abc import Callable, Iterable
from itertools import chain

from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.kv.blocks import BlockPool
from headrace.stats import BlockMap, Holding, SequenceStats


def empty_slots(seqs: Iterable[Sequence], block_size: int, filled: Callable[[Sequence], int]) -> int:
    """Slots beyond the first `filled(sequence)` in the blocks of these sequences; those of a shared block count once."""
    empty: dict[int, int] = {}
    for seq in seqs:
        end = filled(seq)
        for i in range(end // block_size, len(seq.table)):
            left = min(block_size, (i + 1) * block_size - end)
            block = seq.table[i]
            empty[block] = min(left, empty.get(block, left))
    return sum(empty.values())


def block_map(scheduler: Scheduler, pool: BlockPool) -> BlockMap:
    """Who holds which block now."""
    holdings = [Holding(b.request.id, b.seq_id[1], b.computed, list(b.table)) for b in scheduler.running]
    return BlockMap(pool.num_blocks, pool.block_size, holdings, pool.evictable_blocks())


def lines(scheduler: Scheduler, now: float) -> list[SequenceStats]:
    """A line for each sequence: those that run, oldest first, and then the queue."""
    waiting = set(map(id, scheduler.waiting))
    return [_line(seq, id(seq) in waiting, now) for seq in chain(scheduler.running, scheduler.waiting)]


def _line(seq: Sequence, waits: bool, now: float) -> SequenceStats:
    request = seq.request
    if waits:
        state = "waiting" if request.stopwatch.started is None else "preempted"
    elif seq.output.finish_reason:
        state = "padding"
    else:
        state = "decode" if seq.num_uncomputed == 1 else "prefill"
    output = len(seq.output.token_ids)
    return SequenceStats(request.id, seq.seq_id[1], seq.prompt_len, output, request.cached_tokens, state, now - request.stopwatch.added)
