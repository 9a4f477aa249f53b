"""What can be seen of the branches and their blocks between two steps."""

from collections.abc import Callable, Iterable
from itertools import chain

from headrace.engine.branch import Branch
from headrace.engine.scheduler import Scheduler
from headrace.kv.blocks import BlockPool
from headrace.stats import BlockMap, BranchStats, Holding


def empty_slots(branches: Iterable[Branch], block_size: int, filled: Callable[[Branch], int]) -> int:
    """Slots beyond the first `filled(branch)` in the blocks of these branches; those of a shared block count once."""
    empty: dict[int, int] = {}
    for branch in branches:
        end = filled(branch)
        for i in range(end // block_size, len(branch.table)):
            left = min(block_size, (i + 1) * block_size - end)
            block = branch.table[i]
            empty[block] = min(left, empty.get(block, left))
    return sum(empty.values())


def block_map(scheduler: Scheduler, pool: BlockPool) -> BlockMap:
    """Who holds which block now."""
    holdings = [Holding(b.request.id, b.key[1], b.computed, list(b.table)) for b in scheduler.running]
    return BlockMap(pool.num_blocks, pool.block_size, holdings, pool.idle_blocks())


def lines(scheduler: Scheduler, now: float) -> list[BranchStats]:
    """A line for each branch: those that run, oldest first, and then the queue."""
    waiting = set(map(id, scheduler.waiting))
    return [_line(branch, id(branch) in waiting, now) for branch in chain(scheduler.running, scheduler.waiting)]


def _line(branch: Branch, waits: bool, now: float) -> BranchStats:
    request = branch.request
    if waits:
        state = "waiting" if request.stopwatch.started is None else "preempted"
    elif branch.output.finish_reason:
        state = "padding"
    else:
        state = "decode" if branch.missing == 1 else "prefill"
    output = len(branch.output.token_ids)
    return BranchStats(request.id, branch.key[1], branch.prompt_len, output, request.cached_tokens, state, now - request.stopwatch.added)
