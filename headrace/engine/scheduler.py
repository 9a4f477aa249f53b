"""Who is in the next step, with how many rows, and which slots they write.

There are no phases: every sequence has known tokens without KV (one while it decodes, many in a prompt or after preemption),
and a step computes some of them.

**One order.** Everything goes by `Sequence.rank`: the step at which its request came, a level of priority counting as
`STEPS_PER_PRIORITY` steps, then its key. Whoever waits grows more urgent as the steps go by, beside those who come later; no
rank ever changes.

**Everybody finishes.** Take the sequence of the lowest rank of all. If it runs, it has a row in every step and never gives way:
who gives way comes last among those running, so it would have to be alone, and alone every request fits, or it would have been
refused. If it waits, nobody is admitted before it, and those that run end in the same way, the first of them first; at the
latest it is alone then, and is admitted. So it ends, and another is the lowest. Only finitely many ever come before a sequence:
besides those that were there, those that came within `STEPS_PER_PRIORITY` x (difference of priorities) steps after it.

**Nobody gives way twice for nothing.** A sequence is admitted when there are blocks for all its known tokens, and has them at
once, so it needs no other before it has drawn a token. In a group of layers with a window it has as many as a step of its rows and
what they see can touch, or all of them if they are fewer; from then on each block that it releases becomes its next one before
anybody else can take it (`KvManager.advance`, which comes before the step's first reservation), until its known tokens are computed.
That is always possible, because there each sequence pays for all its blocks, also for those that it shares. Only who has drawn since
it was admitted gives way, unless the first needs a block and nobody else has drawn yet; that happens at most once for each block that
the first grows by. Where a window's group cannot keep all siblings of a fork apart, the last of them give way at once.

**Beams go together.** Those of one request are chosen among each other, so they draw in the same step or not at all, and give
way together. When they come back, one of them computes what they have in common before the others fork off. The blocks that
these will need are kept from newcomers, not from those that run, so here a sequence may have to give way before it has drawn.
"""

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import NamedTuple

from headrace.batch import NO_DRAFT, DraftTree
from headrace.config import EngineConfig
from headrace.engine.sequence import Sequence
from headrace.engine.step_timer import StepTimer
from headrace.kv.manager import Copy, Demand, KvManager
from headrace.kv.prefix import Node, PrefixCache

STEPS_PER_PRIORITY = 1000
"""How many steps later a request must have come to be as urgent as one of the next level of priority."""

_RANK = attrgetter("rank")


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One sequence's part of a step."""

    seq: Sequence
    num_scheduled: int
    """Rows of decided tokens. Their slots are reserved."""
    draws: bool
    """Whether they reach the end of what is known, so that the next token can be drawn."""
    budget: int = 0
    """Slots reserved beyond those: for the nodes of a draft, or for more steps in a row."""
    draft: DraftTree = NO_DRAFT
    first_logit: int = 0
    """Index of its first row among the step's rows with logits: first those that score the prompt, then those that draw."""
    first_draw: int = 0

    @property
    def forks(self) -> bool:
        """Whether the sequence's siblings go their own ways after these rows."""
        return bool(self.seq.siblings) and self.num_scheduled == self.seq.num_until_draw

    @property
    def is_plain(self) -> bool:
        """Whether it is one row, without a draft, from which one token is drawn."""
        alone = self.num_scheduled == 1 and self.draws and not self.budget and not self.seq.may_fork
        return alone and self.seq.output.finish_reason is None

    @property
    def max_useful_draft(self) -> int:
        """DraftTree nodes that are of use: none where the sequence may fork, since its draws go different ways, nor for the last token."""
        return self.seq.request.limit - len(self.seq.known) - 1 if self.draws and not self.seq.may_fork else 0


class SchedulerOutput(NamedTuple):
    """A step to be: its parts, and the block copies to make before it."""

    scheduled: list[ScheduledSequence]
    copies: list[Copy]


class Hit(NamedTuple):
    """What the prefix cache has of a sequence."""

    node: Node | None
    """The end of it; None: there is no cache."""
    blocks: list[list[int]]
    """Of each group."""
    length: int
    """Tokens."""


@dataclass
class _Budget:
    """What is left of a step."""

    rows: int
    chunk_work: float
    """For prompts and recomputations, in rows at the beginning of a context."""
    logit_rows: int
    """Beyond the one that every sequence may have."""
    attention_crossover: float
    """Context with which a row costs two such rows."""

    def take(self, seq: Sequence, most: int) -> int:
        """As many of the sequence's next `most` rows as there is room for."""
        cost = 1 + seq.computed / self.attention_crossover
        rows = min(most, self.rows, max(1, int(self.chunk_work / cost)) if self.chunk_work > 0 else 0)
        wanted = seq.prompt_rows(rows)
        if len(wanted) > self.logit_rows:
            rows, wanted = wanted.start - seq.computed + self.logit_rows, wanted[: self.logit_rows]
        self.rows -= rows
        self.chunk_work -= rows * cost
        self.logit_rows -= len(wanted)
        return rows


class Scheduler:
    """Continuous batching under a budget of rows, with a prefix cache and recompute preemption."""

    def __init__(self, kv: KvManager, config: EngineConfig, attention_crossover: float = inf) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both by rank. A sequence that runs has blocks for all its known tokens, or as many as a window lets it have at once."""
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
        self._left = _Budget(0, 0, 0, inf)
        """Of the step that was planned last."""

    def add(self, seq: Sequence) -> None:
        """Queue the first sequence of a request."""
        seq.request.arrival = self._num_steps + STEPS_PER_PRIORITY * seq.request.service.priority
        insort(self.waiting, seq, key=_RANK)

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence, whatever its state, and free what it holds."""
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)
        self._release(seq)

    def fork(self, seq: Sequence) -> list[Sequence]:
        """The sequence and its siblings, which from now on run beside it on the same blocks."""
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            sibling.computed, sibling.node, sibling.num_admitted = seq.computed, seq.node, seq.num_admitted
            sibling.tables = self._kv.fork(seq.tables)
            insort(self.running, sibling, key=_RANK)
        return [seq, *siblings]

    def replace_sequences(self, seqs: list[Sequence], sources: list[Sequence]) -> list[Sequence]:
        """Put the heirs of running sequences that draw together in their place: one for each source, best first.

        A sequence that is the source of several is forked; one that is the source of none is freed.
        """
        left = Counter(sources)
        for seq in seqs:
            if seq not in left:
                self._release(seq)
        successors: list[Sequence] = []
        for source in sources:
            left[source] -= 1  # the last heir is the source itself
            successors.append(source.fork(self._kv.fork(source.tables)) if left[source] else source)
        for rank, successor in enumerate(successors):
            successor.seq_id = (successor.seq_id[0], rank)
        first = self.running.index(seqs[0])
        self.running[first : first + len(seqs)] = successors
        return successors

    def schedule(self) -> SchedulerOutput:
        """Choose the parts of the next step and reserve their slots."""
        self._num_steps += 1
        for seq in self.running:
            self._remember(seq)
        while len(self.running) > self._config.max_num_seqs:  # siblings were born
            self._preempt(self.running[-1])
        while self._kv.is_overdrawn:  # for the same reason
            self._preempt(self._victim(self.running[0]))
        for seq in self.running:
            self._kv.advance(seq.tables, seq.computed, len(seq.known))
        output = SchedulerOutput([], [])
        budget, groups = self._share_rows()
        self._left = budget
        for rows in groups:
            if next(iter(rows)).tables:  # else they have given way
                self._place(output, rows)
        self._admit(output, budget)
        return output

    def grant_draft_budgets(self, wanted: dict[ScheduledSequence, int]) -> list[Copy]:
        """Share what is left of the step among parts that want so many draft nodes: never at the cost of a sequence.

        Returns the block copies to make.
        """
        copies: list[Copy] = []
        left = min(self._left.rows, self._left.logit_rows)
        for i, item in enumerate(sorted(wanted, key=wanted.__getitem__)):  # what one leaves goes to those that want more
            seq, end = item.seq, item.seq.computed + item.num_scheduled
            slots = self._kv.num_slots_beyond(seq.tables, end)
            item.budget = max(0, min(wanted[item], left // (len(wanted) - i), slots))
            copies += self._kv.reserve(seq.tables, seq.computed, item.num_scheduled + item.budget) or ()
            left -= item.budget
        return copies

    def reserve_steps(self, scheduled: list[ScheduledSequence], most: int) -> int:
        """Reserve slots for as many steps in a row, up to `most`, as there are blocks for; one step has its slots already.

        What is left over is given back with the room for drafts, of which such parts have none.
        """
        most = min(most, self._kv.max_rows)
        tables = [item.seq.tables for item in scheduled]
        while most > 1:
            if self._kv.can_extend(tables, [item.seq.computed + most for item in scheduled]):
                for item in scheduled:
                    item.budget = most - 1
                    self._kv.reserve(item.seq.tables, item.seq.computed, most)
                break
            most //= 2
        return most

    def _share_rows(self) -> tuple[_Budget, list[dict[Sequence, int]]]:
        """What is left of the step, and the scheduled rows of the running sequences, by rank, those that draw together in one group.

        Groups that decode go first, then chunks; the first gets one row at least.
        """
        config = self._config
        groups = [dict.fromkeys(group, 0) for _, group in groupby(self.running, lambda seq: seq.group)]
        decoding = [group for group in groups if all(seq.num_uncomputed == 1 for seq in group)]
        chunked = [group for group in groups if any(seq.num_uncomputed > 1 for seq in group)]
        kept_free = 1 if chunked and chunked[0] is groups[0] else 0
        left = config.max_num_batched_tokens
        for group in decoding:
            if len(group) <= left - kept_free:
                group.update(dict.fromkeys(group, 1))
                left -= len(group)
        budget = _Budget(left, left, config.max_logit_rows, inf)
        if decoding:
            budget.chunk_work, budget.attention_crossover = (
                config.chunked_prefill_size + config.max_num_batched_tokens - left,
                self._attention_crossover,
            )
        for group in chunked:
            last = 1 if len(group) > 1 else 0  # the row that draws waits until all can
            for seq in group:
                group[seq] = budget.take(seq, seq.num_until_draw - last)
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
        output.scheduled.extend(ScheduledSequence(seq, num_rows, num_rows == seq.num_uncomputed) for seq, num_rows in rows.items())
        output.copies.extend(copies)

    def _victim(self, needy: Sequence) -> Sequence:
        """Who gives way, `needy` itself or one after it: the last that has drawn since it was admitted, or, to the first, the last."""
        after = self.running[self.running.index(needy) :]
        drawn = [seq for seq in after if seq.has_drawn]
        return drawn[-1] if drawn and drawn[-1].group is not self.running[0].group else after[-1]

    def _preempt(self, victim: Sequence) -> None:
        """Take the blocks away and let the sequence wait; tokens that the cache does not keep are computed again later.

        All that draw with it share its fate.
        """
        group = [seq for seq in self.running if seq.group is victim.group]
        for seq in group:
            self.running.remove(seq)
            self._release(seq)
            seq.computed = 0
        first, *others = group
        if others:
            first.siblings, first.fork_at = others, _common_length(group)
        insort(self.waiting, first, key=_RANK)
        self.num_preemptions += len(group)

    def _admit(self, output: SchedulerOutput, budget: _Budget) -> None:
        """Start waiting sequences as long as the first of them fits."""
        while self.waiting and budget.rows > 0 and budget.chunk_work > 0:
            seq = self.waiting[0]
            if not self._may_run(seq):
                return
            hit = self._find(seq)
            if not self._fits(seq, hit):
                return
            self._start(self.waiting.pop(0), hit)
            self._place(output, {seq: budget.take(seq, seq.num_until_draw)})

    def _start(self, seq: Sequence, hit: Hit) -> None:
        """Give a sequence the blocks of all its known tokens, those that the cache has and others, as far as windows let it."""
        insort(self.running, seq, key=_RANK)
        seq.node, seq.computed = hit.node, hit.length
        seq.num_admitted = len(seq.known)
        seq.tables = self._kv.new_tables()
        self._kv.share(seq.tables, hit.blocks)
        self._kv.reserve(seq.tables, seq.computed, seq.num_uncomputed)
        request = seq.request
        if request.stopwatch.start():
            request.cached_tokens = seq.computed
            self.num_prompt_tokens += seq.prompt_len
            self.num_cached_tokens += seq.computed
        self.step_timer.admit()

    def _may_run(self, seq: Sequence) -> bool:
        """Whether steps are fast enough for another sequence, and few enough run. A sequence alone has one always."""
        num_running = sum(b.width for b in (*self.running, seq))
        return not self.running or (self.step_timer.allows and num_running <= self._config.max_num_seqs)

    def _fits(self, seq: Sequence, hit: Hit) -> bool:
        """Whether there are blocks for all its tokens beside one more for every running sequence. A sequence alone fits always.

        The margin keeps others from giving way as soon as it is admitted.
        """
        if not self.running:
            return True
        running = [(other.tables, _demand(other, other.computed)) for other in self.running]
        return self._kv.fits(_demand(seq, hit.length), hit.blocks, running)

    def _find(self, seq: Sequence) -> Hit:
        """What the cache has of a sequence."""
        if self._cache is None:
            return Hit(None, [[] for _ in self._kv.pools], 0)
        node = self._cache.find(seq.request.scope, seq.known, seq.most_cached)
        return Hit(node, self._cache.blocks(node), node.depth * self._kv.block_size)

    def _remember(self, seq: Sequence) -> None:
        """Let the cache know the blocks that were filled."""
        if self._cache is not None and seq.node is not None:
            seq.node = self._cache.extend(seq.node, seq.tables, seq.known, seq.computed)

    def _release(self, seq: Sequence) -> None:
        self._remember(seq)
        if seq.tables:
            self._kv.free(seq.tables)
        seq.tables, seq.node = (), None


def _demand(seq: Sequence, computed: int) -> Demand:
    """A sequence up to its next token, and what will come of it then."""
    return Demand(len(seq.known) + 1, computed, seq.width, seq.fork_at)


def _common_length(seqs: list[Sequence]) -> int:
    """Known tokens that the sequences, no two of which are alike, have in common."""
    columns = zip(*(seq.known for seq in seqs), strict=True)
    return next(i for i, tokens in enumerate(columns) if len(set(tokens)) > 1)
