"""Chooses the sequences of each step, their rows and their KV slots
(docs/internals/scheduling.md).
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice
from math import ceil, inf
from operator import attrgetter

from headrace.config import EngineConfig
from headrace.engine.preemption import PreemptionPolicy, max_steps
from headrace.engine.queues import SequenceQueues
from headrace.engine.scheduled import RowBudget, ScheduledSequence, SchedulerOutput
from headrace.engine.sequence import Request, Sequence
from headrace.kv.manager import BlockCopy, KvManager
from headrace.kv.prefix import Hit

MAX_PASSING_STEPS = 256
"""Max steps for which requests that pass another one hold it up."""

_COUNTED_STEPS = 8
"""Every such step stands for this many when the scheduler counts the steps of passing."""
_MAX_CANDIDATES = 32
"""Waiting sequences of a step that may pass others."""
_MAX_MATCHES = 4
"""Candidates of a step that are looked up in the prefix cache."""
_MAX_SHARE = 4
"""A prompt that is this many times shorter than the first gets rows before it, at most one row
in this many.
"""

_RANK = attrgetter("rank")


class Scheduler(SequenceQueues):
    """Continuous batching under a budget of rows, with a prefix cache and recompute preemption.

    There are no phases. Every sequence has tokens without KV: one while it decodes, many in a
    prompt or after preemption.
    """

    def __init__(
        self, kv: KvManager, config: EngineConfig, attention_crossover: float = inf
    ) -> None:
        super().__init__(kv, config)
        self._attention_crossover = attention_crossover
        self._max_chunk_rows = config.max_chunk_rows
        self._preemption = PreemptionPolicy(kv, config)
        self._needs_idle_victims = False
        """Whether the next preemption waits for the steps in flight."""

    # Steps

    @property
    def can_overlap(self) -> bool:
        """Whether a step may be scheduled before the launched steps are finished.

        Beams and masks that depend on sampled tokens exclude it, and so does preemption, because
        the blocks are in use.
        """
        if self.suspects or len(self.running) > self._config.max_seqs or self._needs_idle_victims:
            return False
        if any([seq.is_beam or seq.has_changing_mask for seq in self.running]):
            return False
        # With windows, a chunk takes the blocks that the chunk in flight will have released.
        if self._kv.has_windows and any(seq.num_uncomputed > 1 for seq in self.running):
            return False
        return 2 * len(self.running) <= self._kv.num_available

    def schedule(self) -> SchedulerOutput:
        self._num_steps += 1
        self._copies = []
        block_size = self._kv.block_size
        for seq in self.running:
            if seq.node is not None and (seq.node.depth + 1) * block_size <= seq.settled:
                self._cache_full_blocks(seq)

        # Forks of the last step may be more than a step or the KV cache can hold.
        while len(self.running) > self._config.max_seqs:
            self._preempt(self.running[-1])
        while self._kv.is_overcommitted and self.kept:
            self.kept.park()
        while self._kv.is_overcommitted:
            self._preempt(self._choose_victim(self.running[0]))
        # Windows move on before the first allocation of the step, so that a sequence gets the
        # blocks that it releases: see "For lack of blocks" in the docs.
        if self._kv.has_windows:
            for seq in self.running:
                self._kv.advance(seq.tables, seq.settled, len(seq.known))

        if self.kept and self.waiting:
            self._park_for(self.waiting[0])
        only = self._choose_suspect() if self.suspects else None
        if not self.suspects:
            self._preempt_for_first()
            self._admit_before_prompts()
        budget, groups = self._share_rows(only)
        output = SchedulerOutput(scheduled=[], copies=self._copies, rest=budget)
        for rows in groups:
            was_preempted = not next(iter(rows)).tables  # for an earlier group of this step
            if not was_preempted:
                self._schedule_group(output, rows)
        if only is None:
            self._admit(output, budget)
        return output

    def grant_draft_budgets(
        self, output: SchedulerOutput, requested: dict[ScheduledSequence, int]
    ) -> list[BlockCopy]:
        """Share the rest of a step among drafts, without preemption; returns the block copies."""
        copies: list[BlockCopy] = []
        nodes_left = min(output.rest.rows, output.rest.logit_rows)

        # Small requests come first, so that their unused share goes to the larger requests.
        for i, item in enumerate(sorted(requested, key=requested.__getitem__)):
            seq, end = item.seq, item.seq.computed + item.num_scheduled
            share = nodes_left // (len(requested) - i)
            num_slots = self._kv.num_slots_after(seq.tables, end)
            budget = max(0, min(requested[item], share, num_slots))
            new_copies = self._kv.allocate(seq.tables, seq.computed, item.num_scheduled + budget)
            if new_copies is None:  # the copy of a shared block takes the last block
                continue
            item.draft_budget = budget
            copies += new_copies
            nodes_left -= budget
        return copies

    def reserve_steps(self, scheduled: list[ScheduledSequence], max_launches: int) -> int:
        """Allocate slots for up to `max_launches` launches in a row, and return their number."""
        num_launches = min(max_launches, self._kv.max_rows)
        tables = [item.seq.tables for item in scheduled]
        while num_launches > 1:
            ends = [item.seq.computed + num_launches for item in scheduled]
            if self._kv.can_extend(tables, ends):
                for item in scheduled:
                    item.has_spare_slots = True
                    self._kv.allocate(item.seq.tables, item.seq.computed, num_launches)
                break
            num_launches //= 2
        return num_launches

    def _choose_suspect(self) -> Request | None:
        runs = any(seq.request in self.suspects for seq in self.running)
        if not runs and self.waiting and self.waiting[0].request in self.suspects:
            seq = self.waiting[0]
            hit = self._match_prefix(seq)
            if self._may_run(seq) and self._fits(seq, hit):
                self._start(self.waiting.pop(0), hit)
        return next((seq.request for seq in self.running if seq.request in self.suspects), None)

    # Rows

    def _share_rows(self, only: Request | None) -> tuple[RowBudget, list[dict[Sequence, int]]]:
        """Choose the rows of each running sequence: decoding first, then prompt chunks.

        The first in rank always gets a row. Returns the rest of the budget, and the rows by
        group.
        """
        config, num_stages = self._config, self._config.pipeline_parallel_size
        groups: list[dict[Sequence, int]] = []
        decoding: list[dict[Sequence, int]] = []
        prefilling: list[dict[Sequence, int]] = []
        for seq in self.running:
            if not self._is_runnable(seq, only):
                continue
            if seq.is_beam and groups and next(iter(groups[-1])).group is seq.group:
                groups[-1][seq] = 0
            else:
                groups.append({seq: 0})
        for group in groups:
            is_prefilling = max([seq.num_uncomputed for seq in group]) > 1
            (prefilling if is_prefilling else decoding).append(group)

        # Keep one row free for the first group while it is still in its prompt. In a pipeline, each
        # of `num_stages` steps in flight takes its share of the decoding sequences.
        num_reserved = 1 if prefilling and prefilling[0] is groups[0] else 0
        rows_left = config.max_rows
        for group in decoding[: ceil(len(self.running) / num_stages)]:
            if len(group) <= rows_left - num_reserved:
                for seq in group:
                    group[seq] = 1
                rows_left -= len(group)

        budget = RowBudget(
            rows=rows_left,
            chunk_work=rows_left,
            logit_rows=config.max_logit_rows or rows_left,
            attention_crossover=inf,
        )
        if decoding:
            # Prompts must not slow the decoding sequences down too much.
            num_decoding_rows = config.max_rows - rows_left
            budget.chunk_work = config.max_chunk_rows + num_decoding_rows
            budget.attention_crossover = self._attention_crossover

        if prefilling:
            first, *others = prefilling
            num_rows = max(seq.num_until_sample for seq in first)
            short = [group for group in others if all(_is_short(seq, num_rows) for seq in group)]
            short.sort(key=_num_rows)
            num_kept = min(budget.prompt_rows // _MAX_SHARE or 1, sum(map(_num_rows, short)))
            with budget.keeping(num_kept):
                self._take_rows(budget, first)
            for group in (*short, *(group for group in others if group not in short)):
                self._take_rows(budget, group)
        return budget, groups

    def _take_rows(self, budget: RowBudget, group: dict[Sequence, int]) -> None:
        # Beams sample in the same step, so each holds its last row back until all can sample.
        num_held_back = 1 if len(group) > 1 else 0
        for seq in group:
            group[seq] = budget.take(seq, seq.num_until_sample - num_held_back)

    def _is_runnable(self, seq: Sequence, only: Request | None) -> bool:
        """Whether a token to compute is available: in a pipeline only after the last stage."""
        if only is not None and seq.request is not only:
            return False
        if not seq.num_pending:
            return seq.num_uncomputed > 0
        return self._config.pipeline_parallel_size == 1 and seq.length < seq.request.limit

    def _schedule_group(self, output: SchedulerOutput, rows: dict[Sequence, int]) -> None:
        """Allocate the slots of a group, and preempt other sequences, or the group itself."""
        scheduled: list[ScheduledSequence] = []
        copies: list[BlockCopy] = []
        for seq, num_rows in rows.items():
            if not num_rows:
                continue
            if num_rows > 1 or not self._kv.has_slot(seq.tables, seq.computed):
                while (new_copies := self._kv.allocate(seq.tables, seq.computed, num_rows)) is None:
                    if self.kept:
                        self.kept.park()
                        continue
                    victim = self._choose_victim(seq)
                    self._preempt(victim)
                    if victim.group is seq.group:
                        return
                copies += new_copies
            can_sample = num_rows == seq.num_uncomputed and seq.request.samples
            scheduled.append(ScheduledSequence(seq, num_rows, can_sample=can_sample))
        output.scheduled.extend(scheduled)
        output.copies.extend(copies)

    # Preemption

    def _choose_victim(self, needy: Sequence) -> Sequence:
        """Return the sequence to preempt, `needy` or later in rank: the last that has sampled
        since admission.

        Unless a sequence outside the first group has, it is the last of all.
        """
        candidates = self.running[self.running.index(needy) :]
        sampled = [seq for seq in candidates if seq.has_sampled]
        if sampled and sampled[-1].group is not self.running[0].group:
            return sampled[-1]
        return candidates[-1]

    def _preempt_for_first(self) -> None:
        """Preempt running sequences for the first waiting one, and admit it.

        The victims are less urgent, and preemption pays; or they have passed it and held it up for
        `MAX_PASSING_STEPS`.
        """
        self._needs_idle_victims = False
        if not self.waiting or not self.running:
            return
        seq = self.waiting[0]
        if seq.rank > self.running[-1].rank:  # the usual case
            return
        is_urgent = bool(self._preemption.candidates(seq, self.running))
        passers: list[Sequence] = []
        is_counted = self._num_steps % _COUNTED_STEPS == 0
        if is_counted or seq.num_held_up >= MAX_PASSING_STEPS:
            passers = [
                other for other in self.running if other.rank > seq.rank and other.since > seq.since
            ]
        if not is_urgent and not passers:
            return
        hit = self._match_prefix(seq)
        max_width = self._config.max_seqs
        if not self.step_timer.allows_admission:
            max_width = min(max_width, sum(other.width for other in self.running))
        victims: list[Sequence] = []
        if is_urgent:
            victims = self._preemption.choose_victims(seq, hit, self.running, max_width)
        if not victims and passers:
            victims = self._preemption.fewest_victims(seq, hit, self.running, passers, max_width)
            if victims:
                seq.num_held_up += _COUNTED_STEPS
            if seq.num_held_up < MAX_PASSING_STEPS:
                return
        if any(victim.num_in_flight for victim in victims):
            self._needs_idle_victims = True
            return
        for victim in victims:
            if victim.tables:  # else it was preempted with its group
                self._preempt(victim)
        if victims and self._fits(seq, hit := self._match_prefix(seq)):
            self.waiting.remove(seq)  # the victims wait as well
            self._start(seq, hit)

    # Admission

    def _park_for(self, seq: Sequence) -> None:
        """Park kept paths until a waiting sequence fits, if it has a place."""
        if not self._may_run(seq):
            return
        while self.kept and not self._preemption.fits(seq, self._match_prefix(seq), self.running):
            self.kept.park()

    def _admit(self, output: SchedulerOutput, budget: RowBudget) -> None:
        while budget.rows > 0 and budget.chunk_work > 0 and (found := self._find_admissible()):
            seq, hit = found
            if self._read_ahead(hit):
                return
            self.waiting.remove(seq)
            self._start(seq, hit)
            self._schedule_group(output, {seq: budget.take(seq, seq.num_until_sample)})

    def _admit_before_prompts(self) -> None:
        """Admit more urgent and much shorter prompts before running prompts get all rows."""
        if not self.waiting or len(self.running) >= self._config.max_seqs:
            return
        prefilling = [seq for seq in self.running if seq.num_uncomputed > 1]
        if not prefilling:
            return
        first = prefilling[0]
        num_rows = sum(
            seq.num_until_sample for seq in prefilling if _is_short(seq, first.num_until_sample)
        )
        max_rows = self._max_chunk_rows // _MAX_SHARE or 1
        while num_rows < max_rows and (found := self._find_admissible(first)):
            seq, hit = found
            if self._read_ahead(hit):
                return
            self.waiting.remove(seq)
            self._start(seq, hit)
            num_rows += seq.num_until_sample

    def _read_ahead(self, hit: Hit) -> bool:
        """Whether a hit is read from the disk in slices, because running sequences would wait."""
        return bool(self.running) and self._cache is not None and self._cache.read_ahead(hit)

    def _find_admissible(self, prompt: Sequence | None = None) -> tuple[Sequence, Hit] | None:
        """Find the waiting sequence to admit: the first in rank, or a small one that may pass it.

        If a running `prompt` is given, the sequence must get rows before it.
        """
        if not self.waiting or len(self.running) >= self._config.max_seqs:
            return None
        first, *others = self.waiting[:_MAX_CANDIDATES]
        if first.request in self.suspects:
            return None
        may_be_first = prompt is None or self._comes_before(first, prompt)
        if may_be_first and (hit := self._match_if_admissible(first)):
            return first, hit

        # Compare lengths first, because this runs in every step with a full queue.
        max_len = first.width * len(first.known) - 1
        if prompt is not None:
            max_len = min(max_len, prompt.num_until_sample // _MAX_SHARE)
        small = (
            seq
            for seq in others
            if len(seq.known) <= max_len
            and self._is_small(seq, first)
            and (prompt is None or self._comes_before(seq, prompt))
        )
        for number, seq in enumerate(islice(small, _MAX_MATCHES)):
            if number == 0 and not self._may_be_passed(first, fits=not may_be_first):
                return None
            if hit := self._match_if_admissible(seq):
                return seq, hit
        return None

    def _match_if_admissible(self, seq: Sequence) -> Hit | None:
        if not self._may_run(seq):
            return None
        hit = self._match_prefix(seq)
        return hit if self._fits(seq, hit) else None

    @property
    def _can_pass(self) -> bool:
        """Whether small waiting sequences may pass the first; False without a place."""
        if self.suspects or not self.step_timer.allows_admission:
            return False
        return sum(seq.width for seq in self.running) < self._config.max_seqs

    def _may_be_passed(self, first: Sequence, fits: bool) -> bool:
        """Whether the first waiting sequence waits for rows only, or running sequences of a lower
        rank keep it out by themselves.

        If only later ones do, no further request passes. `fits` is False if it is known not to fit.
        """
        if not self._can_pass or first.num_held_up >= MAX_PASSING_STEPS:
            return False
        if fits and self._match_if_admissible(first):
            return True
        place = bisect_left(self.running, first.rank, key=_RANK)
        before, after = self.running[:place], self.running[place:]
        if not after or sum(seq.width for seq in (*before, first)) > self._config.max_seqs:
            return True
        hit = self._match_prefix(first)
        return bool(before) and not self._preemption.fits(first, hit, before, after)

    def _is_small(self, seq: Sequence, first: Sequence) -> bool:
        """Whether a waiting sequence is smaller than the first, and ends soon."""
        return (
            seq.width * len(seq.known) < first.width * len(first.known)
            and max_steps(seq, self._max_chunk_rows) <= MAX_PASSING_STEPS
        )

    def _comes_before(self, seq: Sequence, prompt: Sequence) -> bool:
        """Whether a waiting sequence gets rows before a running prompt.

        A short one does not if the prompt computes its next block, which it can share later.
        """
        if seq.rank < prompt.rank:
            return True
        if not _is_short(seq, prompt.num_until_sample):
            return False
        if self._cache is None or seq.scope != prompt.scope:
            return True
        start = self._match_prefix(seq).num_tokens
        end = start + self._kv.block_size
        return end > len(seq.known) or seq.known[start:end] != prompt.known[start:end]

    def _may_run(self, seq: Sequence) -> bool:
        if not self.running:
            return True
        max_seqs = self._config.max_seqs
        if not self.step_timer.allows_admission or len(self.running) + seq.width > max_seqs:
            return False
        return sum(other.width for other in (*self.running, seq)) <= max_seqs

    def _fits(self, seq: Sequence, hit: Hit) -> bool:
        """Whether there are blocks for a sequence, and a spare for each running one against
        preemption.

        A sequence alone always fits.
        """
        if not self.running and not self._dropped:
            return True
        return self._preemption.fits(seq, hit, self.running)


def _is_short(seq: Sequence, num_rows: int) -> bool:
    return _MAX_SHARE * seq.num_until_sample <= num_rows


def _num_rows(group: Iterable[Sequence]) -> int:
    return sum(seq.num_until_sample for seq in group)
