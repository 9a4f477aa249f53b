"""Multi-step decoding: several launches of plain decoding with the host work of one.

Each launch takes its tokens from the launch before it (`RaggedBatch.token_source`).
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
from headrace.logit_ops import Done, LogitOp, SampleOp, SampleResult, ShiftedSampleOps, Ticket

_MAX_LAUNCHES = 16
"""No request joins, and no token reaches a caller, until all launches are finished."""


class MultiStep:
    """Repeats launches of plain decoding for about `multi_step_ms` milliseconds."""

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
        self._max_seconds = config.multi_step_ms / 1000
        self._clock = clock
        self._launch_seconds = 0.0
        self._last_finish = -inf
        """Seconds of the engine's clock."""

    def plan(self, scheduled: list[ScheduledSequence]) -> int:
        """Reserve slots for several launches, and return the max number; 0 without plain
        decoding.
        """
        if not self._is_on or not all([item.is_plain for item in scheduled]):
            return 0
        max_launches = self._launches_within(self._max_seconds)
        if max_launches == 1:
            return 1
        for item in scheduled:
            seq = item.seq
            # The first token of an output reaches the caller at once.
            max_tokens = seq.request.limit - seq.length if seq.output.token_ids else 1
            max_launches = min(max_launches, max_tokens)
        return self._scheduler.reserve_steps(scheduled, max_launches)

    def launch(
        self,
        scheduled: list[ScheduledSequence],
        batch: RaggedBatch,
        ops: list[LogitOp],
        *,
        max_launches: int,
        max_seconds: float,
        should_stop: Callable[[], bool],
        logits: bool,
        hidden: bool,
        keeps_taps: bool = False,
    ) -> list[Ticket]:
        """Launch up to `max_launches` times, until a sequence ends, time is up, or
        `should_stop()`. `keeps_taps`: the taps of all launches are valid afterwards.
        """
        seconds = min(self._max_seconds, max_seconds)
        max_launches = min(max_launches, self._launches_within(seconds))
        deadline = self._clock() + seconds
        end_ids = [item.seq.output.end_ids for item in scheduled]

        tickets: list[Ticket] = []
        for launch_batch, launch_ops in self._launches(scheduled, batch, ops, max_launches):
            ticket = self._executable.launch(launch_batch, launch_ops, logits=logits, hidden=hidden)
            tickets.append(_with_own_taps(ticket) if keeps_taps else ticket)
            if (
                len(tickets) == max_launches
                or self._clock() >= deadline
                or should_stop()
                or _any_ended(ticket, end_ids)
            ):
                break

        if len(tickets) > 1:
            for item in scheduled:
                item.num_launches = len(tickets)
                item.seq.computed += len(tickets) - 1
                item.seq.num_pending += len(tickets) - 1
        return tickets

    def record(self, step: InFlightStep) -> None:
        """Record the time of a finished step; overlapping time counts once."""
        started = max(step.started, self._last_finish)
        self._last_finish = self._clock()
        # A step with a prompt takes longer; it counts only as long as there is no other figure.
        if step.is_plain or not self._launch_seconds:
            self._launch_seconds = (self._last_finish - started) / len(step.tickets)

    def _launches_within(self, seconds: float) -> int:
        if not self._launch_seconds:
            return _MAX_LAUNCHES
        return max(1, min(_MAX_LAUNCHES, ceil(seconds / self._launch_seconds)))

    def _launches(
        self,
        scheduled: list[ScheduledSequence],
        batch: RaggedBatch,
        ops: list[LogitOp],
        num_launches: int,
    ) -> list[tuple[RaggedBatch, Sequence[LogitOp]]]:
        """Return all batches and ops. They are made first, because a launch evicts the CPU
        caches.
        """
        launches: list[tuple[RaggedBatch, Sequence[LogitOp]]] = [(batch, ops)]
        if num_launches == 1:
            return launches

        # Positions and slots of all later launches at once: [launches - 1, sequences].
        seqs = np.arange(len(scheduled), dtype=np.int32)
        positions = batch.positions + np.arange(1, num_launches, dtype=np.int32)[:, None]
        blocks, offsets = np.divmod(positions, np.int32(self._block_size))
        slots = [
            group.block_table[seqs, blocks] * np.int32(self._block_size) + offsets
            for group in batch.kv
        ]

        sample_ops = cast(list[SampleOp], ops)
        for shift in range(1, num_launches):
            kv = tuple(
                [
                    KvRows(group_slots[shift - 1], group.block_table)
                    for group_slots, group in zip(slots, batch.kv, strict=True)
                ]
            )
            # `batch._replace` would take three times as long.
            shifted_batch = RaggedBatch(
                tokens=batch.tokens,
                positions=positions[shift - 1],
                row_start=batch.row_start,
                context_len=positions[shift - 1],
                scheduled_len=batch.scheduled_len,
                kv=kv,
                ancestors=None,
                logit_rows=batch.logit_rows,
                seq_of=batch.seq_of,
                token_source=seqs,
                adapters=batch.adapters,
            )
            launches.append((shifted_batch, ShiftedSampleOps(sample_ops, shift)))
        return launches


def _with_own_taps(ticket: Ticket) -> Ticket:
    """Copy the taps, which the next launch overwrites."""
    result = ticket.wait()
    return ticket if result.taps is None else Done(result._replace(taps=result.taps.copy()))


def _any_ended(ticket: Ticket, end_ids: list[frozenset[int]]) -> bool:
    if not ticket.ready:
        return False
    for value, ids in zip(ticket.wait().values, end_ids, strict=True):
        if not isinstance(value, SampleResult) or value.tokens[-1] in ids:
            return True
    return False
