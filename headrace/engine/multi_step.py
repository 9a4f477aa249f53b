"""Multi-step decoding: several launches of plain decoding with little work of the host between
them.

Most steps are alike: every sequence has one row and draws one token, no request joins or forks, and
nothing is drafted. What the engine does between two such steps takes as much as a tenth of a small
model's step, since the weights have just displaced the engine's data from the memory caches. So it
is done once for several launches: each takes its tokens from the launch before it
(`RaggedBatch.token_source`), and all are finished together. Each launch is the one that a step of
its own would have made, so the tokens are the same; they only reach the caller later.
"""

from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import cast

import numpy as np

from headrace.backend import Executable
from headrace.batch import KvRows, RaggedBatch
from headrace.config import EngineConfig
from headrace.engine.in_flight import InFlightStep
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.scheduler import Scheduler
from headrace.logit_ops import LogitOp, SampleOp, SampleResult, ShiftedSampleOps, Ticket

_MAX_LAUNCHES = 16
"""Most launches in a row: until they are finished, no request can join and no token reaches a
caller.
"""


class MultiStep:
    """Repeats launches of plain decoding for `multi_step_ms` milliseconds or a little longer.
    `clock` gives seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executable: Executable,
        block_size: int,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._executable = executable
        self._block_size = block_size
        self._is_on = (
            config.acceptance_method == "exact"
            and config.multi_step_ms > 0
            and config.pipeline_parallel_size == 1
        )
        self._seconds = config.multi_step_ms / 1000
        self._clock = clock
        self._step_seconds = 0.0
        """Seconds of a launch of the last plain decoding that was finished, or of the first step; 0
        before that.
        """
        self._finished = -inf
        """Clock, in seconds, when the results of the last step were there."""

    def plan(self, scheduled: list[ScheduledSequence]) -> int:
        """Most launches in a row, with slots reserved for them; 0 where a sequence needs more than
        plain decoding.
        """
        if not self._is_on or not all(item.is_plain for item in scheduled):
            return 0
        most = self._most_within(self._seconds)
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
        """Launch a batch of plain decoding again and again: `most` times, or until a sequence ends,
        the time is over or `is_wanted`.

        `rest` is the seconds until a step may have drafts again; `wanted` are the arguments
        `logits` and `hidden` of `Executable.launch`.
        """
        seconds = min(self._seconds, rest)
        most, until = min(most, self._most_within(seconds)), self._clock() + seconds
        ends = [item.seq.output.end_ids for item in scheduled]
        tickets: list[Ticket] = []
        for its_batch, its_ops in self._launches(scheduled, batch, ops, most):
            tickets.append(self._executable.launch(its_batch, its_ops, **wanted))
            if (
                len(tickets) == most
                or self._clock() >= until
                or is_wanted()
                or _any_ended(tickets[-1], ends)
            ):
                break
        for item in scheduled:
            item.num_launches = len(tickets)
            item.seq.computed += len(tickets) - 1
            item.seq.num_pending += len(tickets) - 1
        return tickets

    def record(self, step: InFlightStep) -> None:
        """The results of a step are there. Where steps overlap, it took no longer than since those
        of the one before it were.
        """
        begun, self._finished = max(step.begun, self._finished), self._clock()
        if step.is_plain or not self._step_seconds:  # one with a prompt takes longer, if anything
            self._step_seconds = (self._finished - begun) / len(step.tickets)

    def _most_within(self, seconds: float) -> int:
        """Launches that take so long, or a little longer."""
        return (
            max(1, min(_MAX_LAUNCHES, ceil(seconds / self._step_seconds)))
            if self._step_seconds
            else _MAX_LAUNCHES
        )

    def _launches(
        self, scheduled: list[ScheduledSequence], batch: RaggedBatch, ops: list[LogitOp], most: int
    ) -> list[tuple[RaggedBatch, Sequence[LogitOp]]]:
        """The batches of all launches and their ops. Batches are made before any launch, which
        displaces all from the caches.
        """
        launches: list[tuple[RaggedBatch, Sequence[LogitOp]]] = [(batch, ops)]
        if most == 1:
            return launches
        seqs = np.arange(len(scheduled), dtype=np.int32)
        draws = cast(list[SampleOp], ops)
        positions = (
            batch.positions + np.arange(1, most, dtype=np.int32)[:, None]
        )  # [launches, sequences]
        blocks, offsets = np.divmod(positions, np.int32(self._block_size))
        slots = [
            group.block_table[seqs, blocks] * np.int32(self._block_size) + offsets
            for group in batch.kv
        ]
        for later, at in enumerate(positions, 1):
            kv = tuple(
                [
                    KvRows(of[later - 1], group.block_table)
                    for of, group in zip(slots, batch.kv, strict=True)
                ]
            )
            its_batch = RaggedBatch(  # `_replace` takes three times as long
                *(
                    batch.tokens,
                    at,
                    batch.row_start,
                    at,
                    batch.scheduled_len,
                    kv,
                    None,
                    batch.logit_rows,
                    batch.seq_of,
                    seqs,
                    None,
                ),
                batch.adapters,
            )
            launches.append((its_batch, ShiftedSampleOps(draws, later)))
        return launches


def _any_ended(ticket: Ticket, ends: list[frozenset[int]]) -> bool:
    """Whether the results are there, and a sequence has drawn one of its `ends` or met logits that
    are not finite.
    """
    if not ticket.ready:
        return False
    for value, end_ids in zip(ticket.wait().values, ends, strict=True):
        if not isinstance(value, SampleResult) or value.tokens[-1] in end_ids:
            return True
    return False
