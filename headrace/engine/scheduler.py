"""Chooses the sequences of each step, their rows and their KV slots
(docs/internals/scheduling.md).
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from math import ceil, inf
from operator import attrgetter

from headrace.config import EngineConfig
from headrace.engine.preemption import PreemptionPolicy, max_steps
from headrace.engine.scheduled import RowBudget, ScheduledSequence, SchedulerOutput
from headrace.engine.sequence import Request, Sequence
from headrace.engine.step_timer import StepTimer
from headrace.kv.manager import Copy, KvManager
from headrace.kv.prefix import Hit, PrefixCache

STEPS_PER_PRIORITY = 1000
"""Steps of waiting that raise a request by one level of priority."""

MAX_PASSING_STEPS = 256
"""Max steps for which requests that pass another one hold it up."""

_MAX_CANDIDATES = 32
"""Waiting sequences of a step that may pass others."""
_MAX_MATCHES = 4
"""Candidates of a step that are looked up in the prefix cache."""
_MAX_SHARE = 4
"""A prompt that is this many times shorter than the first gets rows before it, at most one row
in this many.
"""

_RANK = attrgetter("rank")
_GROUP = attrgetter("group")
_NUM_UNCOMPUTED = attrgetter("num_uncomputed")


class Scheduler:
    """Continuous batching under a budget of rows, with a prefix cache and recompute preemption.

    There are no phases. Every sequence has tokens without KV: one while it decodes, many in a
    prompt or after preemption.
    """

    def __init__(
        self, kv: KvManager, config: EngineConfig, attention_crossover: float = inf
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.suspects: dict[Request, int] = {}
        """Requests of a failed step, with their numbers of tokens. A suspect runs alone until it
        gets another.
        """
        self.step_timer = StepTimer(config.target_token_ms)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._kv = kv
        self._config = config
        self._attention_crossover = attention_crossover
        self._cache = self._new_cache()
        self._preemption = PreemptionPolicy(kv, config)
        self._needs_idle_victims = False
        """Whether the next preemption waits for the steps in flight."""
        self._num_steps = 0
        self._dropped = set[Sequence]()

    # Requests

    def add(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            seq.request.arrival = (
                self._num_steps + STEPS_PER_PRIORITY * seq.request.options.priority
            )
            self.queue(seq)

    def queue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_RANK)

    def drop(self, seq: Sequence) -> None:
        """Remove a sequence; its blocks are free once no launched step uses them."""
        queue = self.running if seq.tables else self.waiting
        place = bisect_left(queue, seq.rank, key=_RANK)
        if place < len(queue) and queue[place] is seq:  # else it was dropped before
            del queue[place]
        if seq.num_in_flight:
            self._dropped.add(seq)
        else:
            self._free(seq)

    def fork(self, seq: Sequence) -> list[Sequence]:
        """Start the siblings of a sequence on the same blocks; returns it and its siblings."""
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            sibling.computed, sibling.settled = seq.computed, seq.settled
            sibling.node, sibling.num_admitted = seq.node, seq.num_admitted
            sibling.tables = self._kv.fork(seq.tables)
            insort(self.running, sibling, key=_RANK)
        return [seq, *siblings]

    def replace_sequences(self, seqs: list[Sequence], sources: list[Sequence]) -> list[Sequence]:
        """Replace running sequences by a successor for each source, best first; other sequences
        are freed.
        """
        num_left = Counter(sources)
        for seq in seqs:
            if seq not in num_left:
                self._free(seq)

        successors: list[Sequence] = []
        for source in sources:
            num_left[source] -= 1
            is_last = num_left[source] == 0  # the last successor is the source itself
            successor = source if is_last else source.fork(self._kv.fork(source.tables))
            successors.append(successor)
        for index, successor in enumerate(successors):
            successor.seq_id = (successor.seq_id[0], index)

        first = self.running.index(seqs[0])
        self.running[first : first + len(seqs)] = successors
        return successors

    # Steps

    @property
    def can_overlap(self) -> bool:
        """Whether a step may be scheduled before the launched steps are finished.

        Beams and masks that depend on sampled tokens exclude it, and so does preemption, because
        the blocks are in use.
        """
        if self.suspects or len(self.running) > self._config.max_seqs or self._needs_idle_victims:
            return False
        if any(seq.request.acceptor.is_group or seq.has_changing_mask for seq in self.running):
            return False
        # With windows, a chunk takes the blocks that the chunk in flight will have released.
        if self._kv.has_windows and any(seq.num_uncomputed > 1 for seq in self.running):
            return False
        return 2 * len(self.running) <= self._kv.num_available

    def schedule(self) -> SchedulerOutput:
        self._num_steps += 1
        for seq in self.running:
            self._cache_full_blocks(seq)

        # Forks of the last step may be more than a step or the KV cache can hold.
        while len(self.running) > self._config.max_seqs:
            self._preempt(self.running[-1])
        while self._kv.is_overcommitted:
            self._preempt(self._choose_victim(self.running[0]))
        # Windows move on before the first allocation of the step, so that a sequence gets the
        # blocks that it releases: see "For lack of blocks" in the docs.
        if self._kv.has_windows:
            for seq in self.running:
                self._kv.advance(seq.tables, seq.settled, len(seq.known))

        only = self._choose_suspect() if self.suspects else None
        if not self.suspects:
            self._preempt_for_urgent()
            self._admit_before_prompts()
        budget, groups = self._share_rows(only)
        output = SchedulerOutput(scheduled=[], copies=[], rest=budget)
        for rows in groups:
            was_preempted = not next(iter(rows)).tables  # for an earlier group of this step
            if not was_preempted:
                self._schedule_group(output, rows)
        if only is None:
            self._admit(output, budget)
        return output

    def grant_draft_budgets(
        self, output: SchedulerOutput, requested: dict[ScheduledSequence, int]
    ) -> list[Copy]:
        """Share the rest of a step among drafts, without preemption; returns the block copies."""
        copies: list[Copy] = []
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

    def finish(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            seq.num_in_flight -= 1
            if not seq.num_in_flight and seq in self._dropped:
                self._dropped.remove(seq)
                self._free(seq)

    # Failed steps

    def restart(self, requests: Iterable[Request]) -> list[Request]:
        """Free all blocks after a failed step, and return the requests that it may have touched.

        If all requests wait, the admission of the first must have failed.
        """
        # Note the sequences that wait, siblings included.
        waiting = {
            sibling
            for seq in self.waiting
            for sibling in (seq, *seq.siblings)
            if not sibling.num_in_flight
        }
        started = {
            request
            for request in requests
            if any(seq not in waiting and seq.output.finish_reason is None for seq in request.seqs)
        }
        untouched = {seq.request for seq in waiting} - started
        touched = [request for request in requests if request not in untouched]
        if not touched:
            touched = [seq.request for seq in self.waiting[:1]]

        for request in touched:
            for seq in request.seqs:
                seq.tables, seq.node, seq.num_in_flight = (), None, 0
        self.waiting = [seq for seq in self.waiting if seq.request not in touched]
        self.running = []
        self._dropped = set()
        self._kv.reset()
        self._cache = self._new_cache()
        return touched

    def clear_suspects(self, scheduled: list[ScheduledSequence]) -> None:
        if not self.suspects:
            return
        for item in scheduled:
            request = item.seq.request
            if request in self.suspects and request.num_tokens > self.suspects[request]:
                del self.suspects[request]

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
        runnable = [seq for seq in self.running if self._is_runnable(seq, only)]
        groups = [dict.fromkeys(group, 0) for _, group in groupby(runnable, _GROUP)]
        decoding: list[dict[Sequence, int]] = []
        prefilling: list[dict[Sequence, int]] = []
        for group in groups:
            is_prefilling = max(map(_NUM_UNCOMPUTED, group)) > 1
            (prefilling if is_prefilling else decoding).append(group)

        # Keep one row free for the first group while it is still in its prompt. In a pipeline, each
        # of `num_stages` steps in flight takes its share of the decoding sequences.
        num_reserved = 1 if prefilling and prefilling[0] is groups[0] else 0
        rows_left = config.max_rows
        for group in decoding[: ceil(len(self.running) / num_stages)]:
            if len(group) <= rows_left - num_reserved:
                group.update(dict.fromkeys(group, 1))
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
        in_pipeline = self._config.pipeline_parallel_size > 1 and seq.num_pending > 0
        return not seq.at_limit and not in_pipeline and only in (None, seq.request)

    def _schedule_group(self, output: SchedulerOutput, rows: dict[Sequence, int]) -> None:
        """Allocate the slots of a group, and preempt other sequences, or the group itself."""
        copies: list[Copy] = []
        rows = {seq: num_rows for seq, num_rows in rows.items() if num_rows}
        for seq, num_rows in rows.items():
            while (new_copies := self._kv.allocate(seq.tables, seq.computed, num_rows)) is None:
                victim = self._choose_victim(seq)
                self._preempt(victim)
                if victim.group is seq.group:
                    return
            copies += new_copies

        for seq, num_rows in rows.items():
            can_sample = num_rows == seq.num_uncomputed and not seq.request.pooling
            output.scheduled.append(
                ScheduledSequence(seq=seq, num_scheduled=num_rows, can_sample=can_sample)
            )
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

    def _preempt_for_urgent(self) -> None:
        """Preempt running sequences for the first waiting one, if that pays, and admit it."""
        self._needs_idle_victims = False
        if not self.waiting or not self._preemption.candidates(self.waiting[0], self.running):
            return
        seq = self.waiting[0]
        hit = self._match_prefix(seq)
        if self._may_run(seq) and self._fits(seq, hit):
            return
        max_width = self._config.max_seqs
        if not self.step_timer.allows_admission:
            max_width = min(max_width, sum(other.width for other in self.running))
        victims = self._preemption.choose_victims(seq, hit, self.running, max_width)
        if any(victim.num_in_flight for victim in victims):
            self._needs_idle_victims = True
            return
        for victim in victims:
            if victim.tables:  # else it was preempted with its group
                self._preempt(victim)
        if victims and self._fits(seq, hit := self._match_prefix(seq)):
            self.waiting.remove(seq)  # the victims wait as well
            self._start(seq, hit)

    def _preempt(self, victim: Sequence) -> None:
        group = [seq for seq in self.running if seq.group is victim.group]
        for seq in group:
            self.running.remove(seq)
            self._free(seq)
            seq.computed = seq.settled = 0

        # Beams compute their common tokens once: the others are forked off after these.
        first, *others = group
        if others:
            first.siblings = others
            first.fork_at = _common_length(group)
        self.queue(first)
        self.num_preemptions += len(group)

    # Admission

    def _admit(self, output: SchedulerOutput, budget: RowBudget) -> None:
        while budget.rows > 0 and budget.chunk_work > 0 and (found := self._find_admissible()):
            seq, hit = found
            self.waiting.remove(seq)
            self._start(seq, hit)
            self._schedule_group(output, {seq: budget.take(seq, seq.num_until_sample)})

    def _admit_before_prompts(self) -> None:
        """Admit more urgent and much shorter prompts before running prompts get all rows."""
        if not self.waiting:
            return
        prefilling = [seq for seq in self.running if seq.num_uncomputed > 1]
        if not prefilling:
            return
        first = prefilling[0]
        num_rows = sum(
            seq.num_until_sample for seq in prefilling if _is_short(seq, first.num_until_sample)
        )
        max_rows = self._config.max_chunk_rows // _MAX_SHARE or 1
        while num_rows < max_rows and (found := self._find_admissible(first)):
            seq, hit = found
            self.waiting.remove(seq)
            self._start(seq, hit)
            num_rows += seq.num_until_sample

    def _find_admissible(self, prompt: Sequence | None = None) -> tuple[Sequence, Hit] | None:
        """Find the waiting sequence to admit: the first in rank, or a small one that may pass it.

        If a running `prompt` is given, the sequence must get rows before it.
        """
        if not self.waiting or self.waiting[0].request in self.suspects:
            return None
        first, *others = self.waiting[:_MAX_CANDIDATES]
        hit = self._match_if_admissible(first)
        if hit and (prompt is None or self._comes_before(first, prompt)):
            return first, hit
        if not self._can_pass or not (hit or self._is_kept_out_by_earlier(first)):
            return None

        num_matches = 0
        for seq in others:
            if num_matches == _MAX_MATCHES:
                return None
            if self._is_small(seq, first) and (prompt is None or self._comes_before(seq, prompt)):
                num_matches += 1
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
        width = sum(seq.width for seq in self.running)
        return (
            not self.suspects and self.step_timer.allows_admission and width < self._config.max_seqs
        )

    def _is_kept_out_by_earlier(self, first: Sequence) -> bool:
        """Whether running sequences of a lower rank keep the first waiting one out.

        If only later ones do, no further request passes. They end within `MAX_PASSING_STEPS`.
        """
        place = bisect_left(self.running, first.rank, key=_RANK)
        before, after = self.running[:place], self.running[place:]
        if sum(seq.width for seq in (*before, first)) > self._config.max_seqs:
            return True
        hit = self._match_prefix(first)
        return bool(before) and not self._preemption.fits(first, hit, before, after)

    def _is_small(self, seq: Sequence, first: Sequence) -> bool:
        """Whether a waiting sequence is smaller than the first, and ends soon."""
        return (
            seq.width * seq.length < first.width * first.length
            and max_steps(seq, self._config.max_chunk_rows) <= MAX_PASSING_STEPS
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
        num_running = sum(other.width for other in (*self.running, seq))
        return self.step_timer.allows_admission and num_running <= self._config.max_seqs

    def _fits(self, seq: Sequence, hit: Hit) -> bool:
        """Whether there are blocks for a sequence, and a spare for each running one against
        preemption.

        A sequence alone always fits.
        """
        if not self.running and not self._dropped:
            return True
        return self._preemption.fits(seq, hit, self.running)

    def _start(self, seq: Sequence, hit: Hit) -> None:
        insort(self.running, seq, key=_RANK)
        seq.node = hit.node
        seq.computed = seq.settled = hit.num_tokens
        seq.num_admitted = len(seq.known)
        seq.tables = self._kv.new_tables()
        if self._cache is not None:
            self._cache.share(hit, seq.tables)
        self._kv.allocate(seq.tables, seq.computed, seq.num_uncomputed)

        request = seq.request
        if request.timer.start():
            request.cached_tokens = min(seq.computed, seq.prompt_len)
            self.num_prompt_tokens += seq.prompt_len
            self.num_cached_tokens += request.cached_tokens
        self.step_timer.reset()

    # The prefix cache

    def _new_cache(self) -> PrefixCache | None:
        return PrefixCache(self._kv) if self._config.prefix_cache else None

    def _match_prefix(self, seq: Sequence) -> Hit:
        if self._cache is None:
            return Hit(node=None, blocks=[[] for _ in self._kv.pools], num_tokens=0)
        node = self._cache.match(seq.request.scope, seq.known, seq.max_cached)
        return Hit(
            node=node,
            blocks=self._cache.blocks(node),
            num_tokens=node.depth * self._kv.block_size,
        )

    def _cache_full_blocks(self, seq: Sequence) -> None:
        node = seq.node
        if self._cache is None or node is None:
            return
        if (node.depth + 1) * self._kv.block_size <= seq.settled:
            seq.node = self._cache.insert(
                node, seq.tables, seq.known, seq.settled, replace=not seq.num_in_flight
            )

    def _free(self, seq: Sequence) -> None:
        self._cache_full_blocks(seq)
        if seq.tables:
            self._kv.free(seq.tables)
        seq.tables, seq.node = (), None


def _is_short(seq: Sequence, num_rows: int) -> bool:
    return _MAX_SHARE * seq.num_until_sample <= num_rows


def _num_rows(group: Iterable[Sequence]) -> int:
    return sum(seq.num_until_sample for seq in group)


def _common_length(seqs: list[Sequence]) -> int:
    columns = zip(*(seq.known for seq in seqs), strict=True)
    return next(i for i, tokens in enumerate(columns) if len(set(tokens)) > 1)
