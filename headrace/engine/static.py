"""Static batching, the baseline that in-flight batching is measured against: a batch starts
together and ends together.

As servers did before iteration-level scheduling (Orca, Yu et al. 2022): memory for the longest
sequence of the batch is reserved for each at the start, none joins, and one that is done goes on
taking a row each step, computed and ignored, until the last one is done. Two things are kinder than
they were: padding of short prompts takes slots but no rows, because a ragged step has no place for
rows without a token, and one that is as long as the longest may become is forgotten when it is
done, because it has no slot left. So the baseline is a little faster here than a padded one.
"""

from dataclasses import replace
from math import inf

from headrace.config import EngineConfig
from headrace.engine.scheduled import ScheduledSequence, SchedulerOutput
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.kv.manager import Demand, KvManager
from headrace.kv.prefix import Hit


class StaticScheduler(Scheduler):
    """Whole batches of waiting requests, first come, first served. Never changes a token."""

    def __init__(
        self, kv: KvManager, config: EngineConfig, attention_crossover: float = inf
    ) -> None:
        # A batch begins as one, and its prompts are not slowed for the sake of its other members:
        # that would burden the baseline.
        super().__init__(kv, replace(config, chunked_prefill_size=0, target_token_ms=0))
        self._batch: set[Sequence] = set()
        self._padded = 0
        """Slots of each member."""
        self._widest = 1
        """Most rows that sequences of the batch must have in one step: beams of a search draw
        together.
        """

    @property
    def can_overlap(self) -> bool:
        """Never: what is padding shows in the results of a step only."""
        return False

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence; one that is done drawing stays as padding until all are done, as long
        as nothing is taken from the others.
        """
        done = [member for member in self.running if member.output.finish_reason]
        crowded = (
            len(done) + self._widest > self._config.max_rows
        )  # padding would leave too few rows to the others
        full = seq.computed >= self._padded  # padding writes one more slot, and none is reserved
        ended = seq.request.pooling or seq.output.finish_reason in ("abort", "error", "timeout")
        if seq not in done or crowded or full or ended:
            super().drop(seq)
        self._end_batch()

    def replace_sequences(self, seqs: list[Sequence], sources: list[Sequence]) -> list[Sequence]:
        """Put the successors of a group in their place; a search that ends has none, and may have
        been the last of the batch.
        """
        successors = super().replace_sequences(seqs, sources)
        self._end_batch()
        return successors

    def schedule(self) -> SchedulerOutput:
        """The rows of the batch; when there is none, of the next one."""
        self._end_batch()  # all that went on beside padding may have given way in the last step
        if not self.running:
            self._form()
        return super().schedule()

    def reserve_steps(self, scheduled: list[ScheduledSequence], most: int) -> int:
        """One step: all slots are reserved already, and what is left of them after some steps would
        be given back.
        """
        return 1

    def _end_batch(self) -> None:
        """Forget the padding once there is nothing else."""
        if all(member.output.finish_reason for member in self.running):
            for member in self.running[:]:
                super().drop(member)

    def _form(self) -> None:
        """Choose the next batch: as many of the queue as may run at once, with blocks for the
        longest of them each.
        """
        self._batch, self._padded, self._widest, num_running = set(), 0, 1, 0
        for seq in self.waiting:
            if self._batch and (
                seq.request in self.suspects
                or any(member.request in self.suspects for member in self._batch)
            ):
                break  # after a step that failed, batches of one
            num_running += seq.width
            padded = max(self._padded, seq.request.limit - 1)  # the last token never has KV
            fits = num_running <= self._config.max_seqs and self._kv.fits(
                Demand(padded, 0, num_running), [[] for _ in self._kv.pools]
            )
            if self._batch and not fits:
                break
            self._batch.add(seq)
            self._padded = padded
            self._widest = max(
                self._widest, seq.request.width if seq.request.acceptor.is_group else 1
            )

    def _fits(self, seq: Sequence, hit: Hit) -> bool:
        """Whether the sequence is of the batch, for which there are blocks."""
        return seq in self._batch

    def _preempt(self, victim: Sequence) -> None:
        if victim.output.finish_reason:  # padding gives way for good
            super().drop(victim)
        else:
            super()._preempt(victim)

    def _place(self, output: SchedulerOutput, rows: dict[Sequence, int]) -> None:
        """Reserve all that the longest member can come to need; where that fails, a request with
        many sequences is alone.
        """
        for seq in rows:
            copies = self._kv.reserve(seq.tables, seq.computed, self._padded - seq.computed)
            if copies is not None:
                output.copies.extend(copies)
        super()._place(output, rows)
