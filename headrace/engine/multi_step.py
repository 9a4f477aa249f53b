"""Multi-step decoding: several launches of plain decoding with little work of the host between them.

Most steps are alike: every sequence has one row and draws one token, no request joins or forks, and nothing is drafted. What the
engine does between two such steps takes as much as a tenth of a small model's step, since the weights have just displaced the engine's data
from the memory caches. So it is done once for several launches: each takes its tokens from the launch before it
(`RaggedBatch.token_source`), and all are finished together. Each launch is the one that a step of its own would have made, so the
tokens are the same; they only reach the caller later.
"""

from collections.abc import Callable
from math import ceil

from headrace.backend import Executable
from headrace.batch import KvRows, RaggedBatch, ints
from headrace.config import EngineConfig
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.scheduler import Scheduler
from headrace.kv.rows import slots_of
from headrace.logit_ops import Draw, Drawn, LogitOp, Ticket

_MAX_LAUNCHES = 16
"""Most launches in a row: until they are finished, no request can join and no token reaches a caller."""


class MultiStep:
    """Repeats launches of plain decoding for `multi_step_ms` milliseconds or a little longer. `clock` gives seconds."""

    def __init__(
        self, scheduler: Scheduler, executable: Executable, block_size: int, config: EngineConfig, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._executable = executable
        self._block_size = block_size
        self._is_on = config.acceptance_method == "exact" and config.multi_step_ms > 0 and config.pipeline_parallel_size == 1
        self._seconds = config.multi_step_ms / 1000
        self._clock = clock
        self._step_seconds = 0.0
        """Seconds of a launch of the last plain decoding; 0 before the first."""

    def plan(self, scheduled: list[ScheduledSequence]) -> int:
        """Most launches in a row, with slots reserved for them; 0 where a sequence needs more than plain decoding."""
        if not self._is_on or not all(item.is_plain for item in scheduled):
            return 0
        most = _MAX_LAUNCHES
        if self._step_seconds:
            most = min(most, ceil(self._seconds / self._step_seconds))
        for item in scheduled:
            seq = item.seq  # its first token reaches the caller at once
            most = min(most, seq.request.limit - seq.length if seq.output.token_ids else 1)
        return self._scheduler.reserve_steps(scheduled, most)

    def launch(
        self,
        scheduled: list[ScheduledSequence],
        batch: RaggedBatch,
        ops: list[LogitOp],
        most: int,
        rest: float,
        is_wanted: Callable[[], bool],
        **wanted: bool,
    ) -> list[Ticket]:
        """Launch a batch of plain decoding again and again: `most` times, or until a sequence ends, the time is over or `is_wanted`.

        `rest` is the seconds until a step may have drafts again; `wanted` are the arguments `logits` and `hidden` of `Executable.launch`.
        """
        begun = self._clock()
        until = begun + min(self._seconds, rest)
        ends = [item.seq.output.end_ids for item in scheduled]
        tickets: list[Ticket] = []
        for its_batch, its_ops in self._launches(scheduled, batch, ops, most):
            tickets.append(self._executable.launch(its_batch, its_ops, **wanted))
            if len(tickets) == most or self._clock() >= until or is_wanted() or _any_ended(tickets[-1], ends):
                break
        self._step_seconds = (self._clock() - begun) / len(tickets)
        for item in scheduled:
            item.num_launches = len(tickets)
            item.seq.computed += len(tickets) - 1
            item.seq.num_pending += len(tickets) - 1
        return tickets

    def _launches(
        self, scheduled: list[ScheduledSequence], batch: RaggedBatch, ops: list[LogitOp], most: int
    ) -> list[tuple[RaggedBatch, list[LogitOp]]]:
        """The batches of all launches and their ops. They are made before the first, which displaces everything from the caches."""
        if most == 1:
            return [(batch, ops)]
        groups = list(zip(*(item.seq.tables for item in scheduled), strict=True))
        source = ints(list(range(len(scheduled))))
        draws = [op for op in ops if isinstance(op, Draw)]
        launches = [(batch, ops)]
        for step in range(1, most):
            positions = [position + step for position in batch.positions.tolist()]
            at = ints(positions)
            written = [range(position, position + 1) for position in positions]
            slots = [slots_of(tables, written, self._block_size) for tables in groups]
            kv = tuple([KvRows(of, group.block_table) for of, group in zip(slots, batch.kv, strict=True)])
            its_batch = RaggedBatch(  # `_replace` takes three times as long
                *(batch.tokens, at, batch.row_start, at, batch.scheduled_len, kv, None, batch.logit_rows, batch.seq_of, source, None),
                batch.adapters,
            )
            its_ops: list[LogitOp] = [Draw(d.row, d.position + step, d.sampler, d.draft, d.num_logprobs, d.method, d.masks) for d in draws]
            launches.append((its_batch, its_ops))
        return launches


def _any_ended(ticket: Ticket, ends: list[frozenset[int]]) -> bool:
    """Whether the results are there, and a sequence has drawn one of its `ends` or met logits that are not finite."""
    if not ticket.ready:
        return False
    for value, end_ids in zip(ticket.wait().values, ends, strict=True):
        if not isinstance(value, Drawn) or value.tokens[-1] in end_ids:
            return True
    return False
