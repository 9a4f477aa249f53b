"""Which sequences are in the next step, with how many rows, and which slots they write.

There are no phases: every sequence has known tokens without KV (one while it decodes, many in a
prompt or after preemption), and a step computes some of them.

**One order.** Everything goes by `Sequence.rank`: the step at which its request came, a level of
priority counting as `STEPS_PER_PRIORITY` steps, then its id. A waiting sequence grows more urgent
as the steps go by, compared with those that come later; no rank ever changes.

**Every request finishes.** Take the sequence of the lowest rank of all. If it runs, it has a row in
every step and is never preempted: a victim comes last among those running, so it would have to be
alone, and alone every request fits, or it would have been refused. If it waits, no other is
admitted before it, and those that run end in the same way, the first of them first; at the latest
it is alone then, and is admitted. So it ends, and another is the lowest. Only finitely many ever
come before a sequence: besides those that were there, those that came within `STEPS_PER_PRIORITY` x
(difference of priorities) steps after it.

**No sequence is preempted twice for nothing.** A sequence is admitted when there are blocks for all
its known tokens, and has them at once, so it needs no other before it has drawn a token. In a group
of layers with a window it has as many as a step of its rows and what they see can touch, or all of
them if they are fewer; from then on each block that it releases becomes its next one before another
sequence can take it (`KvManager.advance`, which comes before the step's first reservation), until
its known tokens are computed. That is always possible, because there each sequence pays for all its
blocks, also for those that it shares. Only sequences that have drawn since they were admitted are
preempted, unless the first needs a block and no other has drawn yet; that happens at most once for
each block that the first grows by. Where a window's group cannot keep all siblings of a fork apart,
the last of them are preempted at once.

**Beams go together.** Those of one request are chosen among each other, so they draw in the same
step or not at all, and are preempted together. When they come back, one of them computes what they
have in common before the others fork off. The blocks that these will need are kept from newcomers,
not from those that run, so here a sequence may be preempted before it has drawn.

**After a step that failed** (`restart`) its requests are suspect. Each of them runs in steps of its
own until it has more tokens than it had, so the one that makes steps fail is found. They wait and
are admitted by rank like all others.

**Steps in flight.** A step counts as done when it is launched: its tokens are computed, and the
token that it draws is pending. So the next step can be scheduled before it is finished, where
`can_overlap`; what a sequence in flight holds is not taken from it. In a pipeline a pending token
is not there before the last stage has run, so the sequences that decode are shared between as many
steps in flight as there are stages; chunks of a prompt follow each other.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from math import ceil, inf
from operator import attrgetter

from headrace.config import EngineConfig
from headrace.engine.scheduled import RowBudget, ScheduledSequence, SchedulerOutput
from headrace.engine.sequence import Request, Sequence
from headrace.engine.step_timer import StepTimer
from headrace.kv.manager import Copy, Demand, KvManager
from headrace.kv.prefix import Hit, PrefixCache

STEPS_PER_PRIORITY = 1000
"""How many steps later a request must have come to be as urgent as one of the next level of
priority.
"""

_RANK, _GROUP, _NUM_UNCOMPUTED = (
    attrgetter("rank"),
    attrgetter("group"),
    attrgetter("num_uncomputed"),
)


class Scheduler:
    """Continuous batching under a budget of rows, with a prefix cache and recompute preemption."""

    def __init__(
        self, kv: KvManager, config: EngineConfig, attention_crossover: float = inf
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both by rank. A sequence that runs has blocks for all its known tokens, or as many as a
        window lets it have at once.
        """
        self.suspects: dict[Request, int] = {}
        """Requests of a step that failed, which run alone until they are further: each with the
        tokens that it had.
        """
        self.step_timer = StepTimer(config.target_token_ms)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of all requests that were admitted."""
        self.num_cached_tokens = 0
        """Those of them that came from the cache."""
        self._kv = kv
        self._cache = PrefixCache(kv) if config.prefix_cache else None
        self._config = config
        self._attention_crossover = attention_crossover
        self._num_steps = 0
        self._dropped = set[Sequence]()
        """Sequences that are forgotten but for their blocks, which launched steps still write and
        read.
        """

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Queue the first sequence of a request, or all with which it goes on."""
        for seq in seqs:
            priority = seq.request.options.priority
            seq.request.arrival = self._num_steps + STEPS_PER_PRIORITY * priority
            self.queue(seq)

    def queue(self, seq: Sequence) -> None:
        """Let a sequence wait, at the place that its request has already."""
        insort(self.waiting, seq, key=_RANK)

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence, whatever its state, and free what it holds once no launched step uses
        it.
        """
        queue = self.running if seq.tables else self.waiting
        place = bisect_left(queue, seq.rank, key=_RANK)
        if place < len(queue) and queue[place] is seq:  # and not dropped before
            del queue[place]
        if seq.num_in_flight:
            self._dropped.add(seq)
        else:
            self._release(seq)

    def restart(self, requests: Iterable[Request]) -> list[Request]:
        """Let go of all that has blocks, after a step that failed at any point; returns those of
        all `requests` that it may have touched.

        All blocks are free then, the cache is empty, and none of the sequences of these requests
        waits any more. A request of which all sequences wait was not touched; where there is no
        other, the first that waits is the one that could not be admitted.
        """
        waits = {
            each for seq in self.waiting for each in (seq, *seq.siblings) if not each.num_in_flight
        }
        busy = {
            request
            for request in requests
            if any(seq not in waits and seq.output.finish_reason is None for seq in request.seqs)
        }
        untouched = {seq.request for seq in waits} - busy
        touched = [request for request in requests if request not in untouched] or [
            seq.request for seq in self.waiting[:1]
        ]
        for seq in [seq for request in touched for seq in request.seqs]:
            seq.tables, seq.node, seq.num_in_flight = (), None, 0
        self.waiting = [seq for seq in self.waiting if seq.request not in touched]
        self.running, self._dropped = [], set()
        self._kv.restart()
        self._cache = PrefixCache(self._kv) if self._config.prefix_cache else None
        return touched

    def finish(self, seqs: Iterable[Sequence]) -> None:
        """A step that these sequences took part in has run: what it used of those that are dropped
        is free.
        """
        for seq in seqs:
            seq.num_in_flight -= 1
            if not seq.num_in_flight and seq in self._dropped:
                self._dropped.remove(seq)
                self._release(seq)

    def clear_suspects(self, scheduled: list[ScheduledSequence]) -> None:
        """A step of these has gone well: those that are further than when they became suspect are
        not suspect any more.
        """
        for request in [item.seq.request for item in scheduled] if self.suspects else ():
            if request.num_tokens > self.suspects.get(request, request.num_tokens):
                del self.suspects[request]

    def fork(self, seq: Sequence) -> list[Sequence]:
        """The sequence and its siblings, which from now on run as sequences of their own on the
        same blocks.
        """
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            sibling.computed, sibling.settled = seq.computed, seq.settled
            sibling.node, sibling.num_admitted = seq.node, seq.num_admitted
            sibling.tables = self._kv.fork(seq.tables)
            insort(self.running, sibling, key=_RANK)
        return [seq, *siblings]

    def replace_sequences(self, seqs: list[Sequence], sources: list[Sequence]) -> list[Sequence]:
        """Put the successors of a group of running sequences in their place: one for each source,
        best first.

        A sequence that is the source of several is forked; one that is the source of none is freed.
        """
        left = Counter(sources)
        for seq in seqs:
            if seq not in left:
                self._release(seq)
        successors: list[Sequence] = []
        for source in sources:
            left[source] -= 1  # the last successor is the source itself
            successors.append(source.fork(self._kv.fork(source.tables)) if left[source] else source)
        for rank, successor in enumerate(successors):
            successor.seq_id = (successor.seq_id[0], rank)
        first = self.running.index(seqs[0])
        self.running[first : first + len(seqs)] = successors
        return successors

    @property
    def can_overlap(self) -> bool:
        """Whether a step may be scheduled while launched ones have not been finished.

        The results of those must not matter to it, so there may be no group, and no mask that
        depends on them; and no sequence may have to give way, since what it holds is in use. A
        running sequence takes two blocks at most in a step without chunks: one for the next token,
        and one for a copy of a block that it shares.
        """
        if self.suspects or len(self.running) > self._config.max_seqs:
            return False
        if any(seq.request.acceptor.is_group or seq.has_changing_mask for seq in self.running):
            return False
        if self._kv.has_windows and any(seq.num_uncomputed > 1 for seq in self.running):
            return False  # a chunk takes the blocks that the chunk in flight will have released
        return 2 * len(self.running) <= self._kv.num_available

    def schedule(self) -> SchedulerOutput:
        """Choose the sequences of the next step and reserve their slots."""
        self._num_steps += 1
        for seq in self.running:
            self._remember(seq)
        while len(self.running) > self._config.max_seqs:  # siblings were born
            self._preempt(self.running[-1])
        while self._kv.is_overdrawn:  # for the same reason
            self._preempt(self._victim(self.running[0]))
        if self._kv.has_windows:
            for seq in self.running:
                self._kv.advance(seq.tables, seq.settled, len(seq.known))
        alone = self._suspect() if self.suspects else None
        budget, groups = self._share_rows(alone)
        output = SchedulerOutput([], [], budget)
        for rows in groups:
            if next(iter(rows)).tables:  # else they have given way
                self._place(output, rows)
        if alone is None:
            self._admit(output, budget)
        return output

    def grant_draft_budgets(
        self, output: SchedulerOutput, wanted: dict[ScheduledSequence, int]
    ) -> list[Copy]:
        """Share what a step has left among sequences that want so many draft nodes: never at the
        cost of a sequence.

        Returns the block copies to make.
        """
        copies: list[Copy] = []
        left = min(output.rest.rows, output.rest.logit_rows)
        for i, item in enumerate(
            sorted(wanted, key=wanted.__getitem__)
        ):  # what one leaves goes to those that want more
            seq, end = item.seq, item.seq.computed + item.num_scheduled
            budget = max(
                0,
                min(
                    wanted[item],
                    left // (len(wanted) - i),
                    self._kv.num_slots_beyond(seq.tables, end),
                ),
            )
            more = self._kv.reserve(seq.tables, seq.computed, item.num_scheduled + budget)
            if more is None:  # a copy of a shared block took what there was
                continue
            item.draft_budget = budget
            copies += more
            left -= budget
        return copies

    def reserve_steps(self, scheduled: list[ScheduledSequence], most: int) -> int:
        """Reserve slots for as many launches in a row, up to `most`, as there are blocks for; one
        launch has its slots already.

        What is left over is given back when the step is finished.
        """
        most = min(most, self._kv.max_rows)
        tables = [item.seq.tables for item in scheduled]
        while most > 1:
            if self._kv.can_extend(tables, [item.seq.computed + most for item in scheduled]):
                for item in scheduled:
                    item.has_spare_slots = True
                    self._kv.reserve(item.seq.tables, item.seq.computed, most)
                break
            most //= 2
        return most

    def _suspect(self) -> Request | None:
        """The suspect that is alone in the next step: the one that runs, or the first that waits,
        which is admitted.
        """
        if (
            not any(seq.request in self.suspects for seq in self.running)
            and self.waiting
            and self.waiting[0].request in self.suspects
        ):
            hit = self._find(self.waiting[0])
            if self._may_run(self.waiting[0]) and self._fits(self.waiting[0], hit):
                self._start(self.waiting.pop(0), hit)
        return next((seq.request for seq in self.running if seq.request in self.suspects), None)

    def _share_rows(self, alone: Request | None) -> tuple[RowBudget, list[dict[Sequence, int]]]:
        """What is left of the step, and the scheduled rows of the running sequences, by rank, those
        that draw together in one group.

        Groups that decode go first, then chunks; the first gets one row at least. All are of one
        request, if it is to be `alone`.
        """
        config = self._config
        stages = config.pipeline_parallel_size
        able = [
            seq
            for seq in self.running
            if not seq.at_limit
            and alone in (None, seq.request)
            and (stages == 1 or not seq.num_pending)
        ]
        groups = [dict.fromkeys(group, 0) for _, group in groupby(able, _GROUP)]
        decoding: list[dict[Sequence, int]] = []
        chunked: list[dict[Sequence, int]] = []
        for group in groups:
            (chunked if max(map(_NUM_UNCOMPUTED, group)) > 1 else decoding).append(group)
        kept_free = 1 if chunked and chunked[0] is groups[0] else 0
        left = config.max_rows
        for group in decoding[: ceil(len(self.running) / stages)]:
            if len(group) <= left - kept_free:
                group.update(dict.fromkeys(group, 1))
                left -= len(group)
        budget = RowBudget(left, left, config.max_logit_rows or left, inf)
        if decoding:
            budget.chunk_work, budget.attention_crossover = (
                config.max_chunk_rows + config.max_rows - left,
                self._attention_crossover,
            )
        for group in chunked:
            last = 1 if len(group) > 1 else 0  # the row that draws waits until all can
            for seq in group:
                group[seq] = budget.take(seq, seq.num_until_sample - last)
        return budget, groups

    def _place(self, output: SchedulerOutput, rows: dict[Sequence, int]) -> None:
        """Reserve slots for a group, at the cost of others if need be, or give way."""
        copies: list[Copy] = []
        rows = {seq: num_rows for seq, num_rows in rows.items() if num_rows}
        for seq, num_rows in rows.items():
            while (more := self._kv.reserve(seq.tables, seq.computed, num_rows)) is None:
                victim = self._victim(seq)
                self._preempt(victim)
                if victim.group is seq.group:
                    return
            copies += more
        for seq, num_rows in rows.items():
            output.scheduled.append(
                ScheduledSequence(
                    seq, num_rows, num_rows == seq.num_uncomputed and not seq.request.pooling
                )
            )
        output.copies.extend(copies)

    def _victim(self, needy: Sequence) -> Sequence:
        """The sequence to preempt, `needy` or one after it: the last that has drawn since it was
        admitted, or, for the first, the last.
        """
        after = self.running[self.running.index(needy) :]
        drawn = [seq for seq in after if seq.has_drawn]
        return drawn[-1] if drawn and drawn[-1].group is not self.running[0].group else after[-1]

    def _preempt(self, victim: Sequence) -> None:
        """Take the blocks away and let the sequence wait; tokens that the cache does not keep are
        computed again later.

        All that draw with it share its fate.
        """
        group = [seq for seq in self.running if seq.group is victim.group]
        for seq in group:
            self.running.remove(seq)
            self._release(seq)
            seq.computed = seq.settled = 0
        first, *others = group
        if others:
            first.siblings, first.fork_at = others, _common_length(group)
        insort(self.waiting, first, key=_RANK)
        self.num_preemptions += len(group)

    def _admit(self, output: SchedulerOutput, budget: RowBudget) -> None:
        """Start waiting sequences as long as the first of them fits."""
        while self.waiting and budget.rows > 0 and budget.chunk_work > 0:
            seq = self.waiting[0]
            if seq.request in self.suspects or not self._may_run(seq):
                return
            hit = self._find(seq)
            if not self._fits(seq, hit):
                return
            self._start(self.waiting.pop(0), hit)
            self._place(output, {seq: budget.take(seq, seq.num_until_sample)})

    def _start(self, seq: Sequence, hit: Hit) -> None:
        """Give a sequence the blocks of all its known tokens, those that the cache has and others,
        as far as windows let it.
        """
        insort(self.running, seq, key=_RANK)
        seq.node, seq.computed = hit.node, hit.length
        seq.settled = seq.computed
        seq.num_admitted = len(seq.known)
        seq.tables = self._kv.new_tables()
        if self._cache is not None:
            self._cache.share(hit, seq.tables)
        self._kv.reserve(seq.tables, seq.computed, seq.num_uncomputed)
        request = seq.request
        if request.timer.start():
            request.cached_tokens = min(seq.computed, seq.prompt_len)
            self.num_prompt_tokens += seq.prompt_len
            self.num_cached_tokens += request.cached_tokens
        self.step_timer.reset()

    def _may_run(self, seq: Sequence) -> bool:
        """Whether steps are fast enough for another sequence, and few enough run. A sequence alone
        has one always.
        """
        num_running = sum(b.width for b in (*self.running, seq))
        return not self.running or (
            self.step_timer.allows_admission and num_running <= self._config.max_seqs
        )

    def _fits(self, seq: Sequence, hit: Hit) -> bool:
        """Whether there are blocks for all its tokens beside one more for every running sequence. A
        sequence alone fits always.

        The margin keeps others from giving way as soon as it is admitted.
        """
        if not self.running and not self._dropped:
            return True
        running = [(other.tables, _demand(other, other.computed)) for other in self.running]
        return self._kv.fits(_demand(seq, hit.length), hit.blocks, running)

    def _find(self, seq: Sequence) -> Hit:
        """What the cache has of a sequence."""
        if self._cache is None:
            return Hit(None, [[] for _ in self._kv.pools], 0)
        node = self._cache.find(seq.request.scope, seq.known, seq.max_cached)
        return Hit(node, self._cache.blocks(node), node.depth * self._kv.block_size)

    def _remember(self, seq: Sequence) -> None:
        """Let the cache know the blocks that finished steps have filled."""
        node = seq.node
        if (
            self._cache is not None
            and node is not None
            and (node.depth + 1) * self._kv.block_size <= seq.settled
        ):
            seq.node = self._cache.extend(
                node, seq.tables, seq.known, seq.settled, exchange=not seq.num_in_flight
            )

    def _release(self, seq: Sequence) -> None:
        self._remember(seq)
        if seq.tables:
            self._kv.free(seq.tables)
        seq.tables, seq.node = (), None


def _demand(seq: Sequence, computed: int) -> Demand:
    """A sequence up to its next token, and what will come of it then."""
    return Demand(seq.length + 1, computed, seq.width, seq.fork_at)


def _common_length(seqs: list[Sequence]) -> int:
    """Known tokens that the sequences, no two of which are alike, have in common."""
    columns = zip(*(seq.known for seq in seqs), strict=True)
    return next(i for i, tokens in enumerate(columns) if len(set(tokens)) > 1)
