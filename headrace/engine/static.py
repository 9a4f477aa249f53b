"""Static batching, the baseline of in-flight batching (Orca, Yu et al. 2022)."""

from dataclasses import replace
from math import inf

from headrace.config import EngineConfig
from headrace.engine.scheduled import ScheduledSequence, SchedulerOutput
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.kv.blocks import Demand
from headrace.kv.manager import KvManager
from headrace.kv.prefix import Hit


class StaticScheduler(Scheduler):
    """Runs whole batches of waiting requests, by rank.

    No sequence joins a batch. Each reserves memory for the longest, and a finished sequence takes
    a row of padding until the batch ends. Short prompts take no padding rows, and finished
    sequences of the maximum length are dropped.
    """

    def __init__(
        self, kv: KvManager, config: EngineConfig, attention_crossover: float = inf
    ) -> None:
        # All prompts of a batch start together, so chunks and slow admission would only slow the
        # baseline down.
        plain = replace(
            config,
            chunked_prefill_size=0,
            target_token_ms=0,
            priority_scheduling_preemption_threshold=0,
        )
        super().__init__(kv, plain)
        self._batch: set[Sequence] = set()
        self._num_slots = 0
        self._max_group = 1

    @property
    def can_overlap(self) -> bool:
        """Always False: the results of a step show which sequences become padding."""
        return False

    @property
    def _can_pass(self) -> bool:
        return False

    def drop(self, seq: Sequence) -> None:
        padding = [member for member in self.running if member.output.finish_reason]
        has_rows = len(padding) + self._max_group <= self._config.max_rows
        has_slot = seq.computed < self._num_slots
        was_stopped = seq.output.finish_reason in ("abort", "error", "timeout")
        can_pad = has_rows and has_slot and not was_stopped and not seq.request.pooling
        if seq not in padding or not can_pad:
            super().drop(seq)
        self._end_batch()

    def replace_sequences(self, seqs: list[Sequence], sources: list[Sequence]) -> list[Sequence]:
        successors = super().replace_sequences(seqs, sources)
        self._end_batch()  # a search that ends has no successors, and may be the last of the batch
        return successors

    def schedule(self) -> SchedulerOutput:
        self._end_batch()  # the last step may have preempted all sequences that are not padding
        if not self.running:
            self._start_batch()
        return super().schedule()

    def reserve_steps(self, scheduled: list[ScheduledSequence], max_launches: int) -> int:
        """Return 1: unused slots of several launches would be freed."""
        return 1

    def _end_batch(self) -> None:
        if all(member.output.finish_reason for member in self.running):
            for member in self.running[:]:
                super().drop(member)

    def _start_batch(self) -> None:
        self._batch, self._num_slots, self._max_group = set(), 0, 1
        num_running = 0
        for seq in self.waiting:
            # After a failed step, suspects run in batches of one.
            if self._batch and any(
                member.request in self.suspects for member in (seq, *self._batch)
            ):
                break

            num_running += seq.width
            num_slots = max(self._num_slots, seq.request.limit - 1)  # the last token has no KV
            demand = Demand(num_tokens=num_slots, width=num_running)
            fits = num_running <= self._config.max_seqs and self._kv.fits(
                demand, hit=[[] for _ in self._kv.pools]
            )
            if self._batch and not fits:
                break

            self._batch.add(seq)
            self._num_slots = num_slots
            if seq.request.acceptor.is_group:
                self._max_group = max(self._max_group, seq.request.width)

    def _fits(self, seq: Sequence, hit: Hit) -> bool:
        return seq in self._batch

    def _preempt(self, victim: Sequence) -> None:
        if victim.output.finish_reason:  # padding is dropped for good
            super().drop(victim)
        else:
            super()._preempt(victim)

    def _schedule_group(self, output: SchedulerOutput, rows: dict[Sequence, int]) -> None:
        for seq in rows:
            num_slots = self._num_slots - seq.computed
            copies = self._kv.allocate(seq.tables, seq.computed, num_slots)
            if copies is not None:
                output.copies.extend(copies)
        super()._schedule_group(output, rows)
