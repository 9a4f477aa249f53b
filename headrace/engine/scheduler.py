"""Who is in the next step, with how many rows, and which slots they write.

There are no phases: every branch has known tokens without KV (one while it decodes, many in a prompt or after preemption),
and a step computes some of them. Branches are served by age, which is the order of their keys; every waiting branch is
younger than every running one. When blocks run out, the youngest running branch gives its own back and waits again, so the
oldest always goes on, and everybody becomes the oldest.

Beams of one request are chosen among each other, so they draw in the same step or not at all, and give way together. When
they come back, one of them computes what they have in common before the others fork off.
"""

from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from headrace.batch import NO_GUESS, Guess
from headrace.config import EngineConfig
from headrace.engine.branch import Branch
from headrace.kv.blocks import BlockCopy, BlockPool


@dataclass(slots=True, eq=False)
class Part:
    """One branch's part of a step."""

    branch: Branch
    forced: int
    """Rows of decided tokens. Their slots are reserved, and those of `room` guess nodes after them."""
    draws: bool
    """Whether they reach the end of what is known, so that the next token can be drawn."""
    room: int = 0
    guess: Guess = NO_GUESS
    first_logit: int = 0
    """Index of its first row among the step's rows with logits: first those that score the prompt, then those that draw."""
    first_draw: int = 0

    @property
    def forks(self) -> bool:
        """Whether the branch's siblings go their own ways after these rows."""
        return bool(self.branch.siblings) and self.forced == self.branch.due


class Plan(NamedTuple):
    """A step to be: its parts, oldest first, and the block copies to make before it."""

    parts: list[Part]
    copies: list[BlockCopy]


@dataclass
class _Budget:
    """What is left of a step."""

    rows: int
    logit_rows: int
    """Beyond the one that every branch may have."""

    def take(self, branch: Branch, most: int) -> int:
        """As many of the branch's next `most` rows as there is room for."""
        rows = min(most, self.rows)
        wanted = branch.prompt_rows(rows)
        if len(wanted) > self.logit_rows:
            rows, wanted = wanted.start - branch.computed + self.logit_rows, wanted[: self.logit_rows]
        self.rows -= rows
        self.logit_rows -= len(wanted)
        return rows


class Scheduler:
    """Continuous batching under a budget of rows, with recompute preemption; first come, first served."""

    def __init__(self, pool: BlockPool, config: EngineConfig, max_nodes: int) -> None:
        self.waiting: deque[Branch] = deque()
        self.running: list[Branch] = []
        self.num_preemptions = 0
        self._pool = pool
        self._config = config
        self._max_nodes = max_nodes

    def add(self, branch: Branch) -> None:
        """Put a new branch at the end of the queue."""
        self.waiting.append(branch)

    def drop(self, branch: Branch) -> None:
        """Forget a branch, whatever its state, and free what it holds."""
        for queue in (self.running, self.waiting):
            if branch in queue:
                queue.remove(branch)
        self._pool.free(branch.table)

    def fork(self, branch: Branch) -> list[Branch]:
        """The branch and its siblings, which from now on run beside it on the same blocks."""
        siblings, branch.siblings = branch.siblings, []
        for sibling in siblings:
            sibling.computed, sibling.table = branch.computed, self._pool.fork(branch.table)
            insort(self.running, sibling, key=lambda b: b.key)
        return [branch, *siblings]

    def succeed(self, branches: list[Branch], sources: list[Branch]) -> list[Branch]:
        """Put the heirs of running branches that draw together in their place: one for each source, best first.

        A branch that is the source of several is forked; one that is the source of none is freed.
        """
        left = Counter(sources)
        for branch in branches:
            if branch not in left:
                self._pool.free(branch.table)
        heirs: list[Branch] = []
        for source in sources:
            left[source] -= 1  # the last heir is the source itself
            heirs.append(source.fork(self._pool.fork(source.table)) if left[source] else source)
        for rank, heir in enumerate(heirs):
            heir.key = (heir.key[0], rank)
        first = self.running.index(branches[0])
        self.running[first : first + len(branches)] = heirs
        return heirs

    def schedule(self) -> Plan:
        """Choose the parts of the next step and reserve their slots."""
        while len(self.running) > self._config.max_num_seqs:  # siblings were born
            self._preempt(self.running[-1])
        budget = _Budget(self._config.max_step_rows, self._config.max_logit_rows)
        plan = Plan([], [])
        end = 0
        for rows in self._share_rows(budget):
            end += len(rows)
            if end > len(self.running):  # it gave way to those before it
                break
            self._place(plan, rows)
        self._admit(plan, budget)
        self._give_room(plan, budget)
        return plan

    def _share_rows(self, budget: _Budget) -> list[dict[Branch, int]]:
        """Forced rows of the running branches, those that draw together in one group, oldest first.

        Groups that decode go first, then chunks by age; the oldest gets one row at least.
        """
        groups = [dict.fromkeys(group, 0) for _, group in groupby(self.running, lambda branch: branch.joined)]
        decoding = [group for group in groups if all(branch.missing == 1 for branch in group)]
        chunked = [group for group in groups if any(branch.missing > 1 for branch in group)]
        kept_free = 1 if chunked and chunked[0] is groups[0] else 0
        for group in decoding:
            if len(group) <= budget.rows - kept_free:
                group.update(dict.fromkeys(group, 1))
                budget.rows -= len(group)
        for group in chunked:
            last = 1 if len(group) > 1 else 0  # the row that draws waits until all can
            for branch in group:
                group[branch] = budget.take(branch, branch.due - last)
        return groups

    def _place(self, plan: Plan, rows: dict[Branch, int]) -> None:
        """Reserve slots for a group, at the cost of the youngest if need be, which may be the group itself."""
        copies: list[BlockCopy] = []
        rows = {branch: num_rows for branch, num_rows in rows.items() if num_rows}
        for branch, num_rows in rows.items():
            while (more := self._pool.reserve(branch.table, branch.computed, num_rows)) is None:
                if self._preempt(self.running[-1]) is branch.joined:
                    return
            copies += more
        plan.parts.extend(Part(branch, num_rows, num_rows == branch.missing) for branch, num_rows in rows.items())
        plan.copies.extend(copies)

    def _preempt(self, youngest: Branch) -> object:
        """Take the blocks away, and put the branch at the head of the queue; its tokens are computed again later.

        All that draw with it share its fate. Returns what they have in common.
        """
        group = [branch for branch in self.running if branch.joined is youngest.joined]
        for branch in group:
            self.running.remove(branch)
            self._pool.free(branch.table)
            branch.computed = 0
        first, *others = group
        if others:
            first.siblings, first.fork_at = others, _common_length(group)
        self.waiting.appendleft(first)
        self.num_preemptions += len(group)
        return youngest.joined

    def _admit(self, plan: Plan, budget: _Budget) -> None:
        """Start waiting branches as long as the first of them fits."""
        while self.waiting and self._fits(self.waiting[0]) and (rows := budget.take(self.waiting[0], self.waiting[0].due)):
            branch = self.waiting.popleft()
            self.running.append(branch)
            branch.request.stopwatch.start()
            self._place(plan, {branch: rows})

    def _fits(self, branch: Branch) -> bool:
        """Whether there are seats, and blocks for all its tokens and for one more block of every running branch.

        The margin keeps a branch from being preempted as soon as it is admitted. A branch alone fits always.
        """
        if not self.running:
            return True
        seats = sum(b.width for b in (*self.running, branch))
        promised = sum(max(0, self._needs(b) - len(b.table)) for b in self.running)
        margin = len(self.running)
        return seats <= self._config.max_num_seqs and self._needs(branch) + promised + margin <= self._pool.num_free

    def _needs(self, branch: Branch) -> int:
        """Blocks that hold the known tokens and the next, and for every branch to come of it as many as it will not share."""
        whole = self._pool.blocks_for(len(branch.known) + 1)
        return whole + (branch.width - 1) * (whole - branch.fork_at // self._pool.block_size)

    def _give_room(self, plan: Plan, budget: _Budget) -> None:
        """Share what is left among the branches that draw, for guesses: never at the cost of a branch.

        A branch that is about to fork gets none, since its draws go different ways; a beam may fork at any draw.
        """
        guessing = [part for part in plan.parts if part.draws and not part.branch.may_fork] if self._max_nodes else []
        for i, part in enumerate(guessing):
            branch, end = part.branch, part.branch.computed + part.forced
            share = min(budget.rows, budget.logit_rows) // (len(guessing) - i)
            slots = (len(branch.table) + self._pool.num_free) * self._pool.block_size - end
            useful = branch.request.limit - len(branch.known) - 1  # the last token needs no guess
            part.room = max(0, min(share, slots, useful, self._max_nodes))
            plan.copies.extend(self._pool.reserve(branch.table, end, part.room) or ())
            budget.rows -= part.room
            budget.logit_rows -= part.room


def _common_length(branches: list[Branch]) -> int:
    """Known tokens that the branches, no two of which are alike, have in common."""
    columns = zip(*(branch.known for branch in branches), strict=True)
    return next(i for i, tokens in enumerate(columns) if len(set(tokens)) > 1)
