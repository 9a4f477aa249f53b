"""Who is in the next step, with how many rows, and which slots they write.

There are no phases: every branch has known tokens without KV (one while it decodes, many in a prompt or after preemption),
and a step computes some of them. Branches are served by age, which is the order of their keys; every waiting branch is
younger than every running one. When blocks run out, the youngest running branch gives its own back and waits again, so the
oldest always goes on, and everybody becomes the oldest.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
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

    def take(self, branch: Branch) -> int:
        """As many of the branch's missing rows as there is room for."""
        rows = min(branch.missing, self.rows)
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
            sibling.known, sibling.computed = list(branch.known), branch.computed
            sibling.table = self._pool.fork(branch.table)
            insort(self.running, sibling, key=lambda b: b.key)
        return [branch, *siblings]

    def schedule(self) -> Plan:
        """Choose the parts of the next step and reserve their slots."""
        while len(self.running) > self._config.max_num_seqs:  # siblings were born
            self._preempt(self.running[-1])
        budget = _Budget(self._config.max_step_rows, self._config.max_logit_rows)
        plan = Plan([], [])
        rows = self._share_rows(budget)
        for branch in self.running:  # loses branches at its end while we go
            if num_rows := rows.get(branch):
                self._place(plan, branch, num_rows)
        self._admit(plan, budget)
        self._give_room(plan, budget)
        return plan

    def _share_rows(self, budget: _Budget) -> dict[Branch, int]:
        """Forced rows of the running branches: those that decode go first, then chunks by age; the oldest gets one at least."""
        decoding: list[Branch] = []
        chunked: list[Branch] = []
        for branch in self.running:
            (decoding if branch.missing == 1 else chunked).append(branch)
        kept_free = 1 if chunked and chunked[0] is self.running[0] else 0
        rows = dict.fromkeys(decoding[: budget.rows - kept_free], 1)
        budget.rows -= len(rows)
        for branch in chunked:
            rows[branch] = budget.take(branch)
        return rows

    def _place(self, plan: Plan, branch: Branch, rows: int) -> None:
        """Reserve slots, at the cost of the youngest if need be, which may be the branch itself."""
        while (copies := self._pool.reserve(branch.table, branch.computed, rows)) is None:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is branch:
                return
        plan.parts.append(Part(branch, rows, rows == branch.missing))
        plan.copies.extend(copies)

    def _preempt(self, branch: Branch) -> None:
        """Take the blocks away, and put the branch at the head of the queue; its tokens are computed again later."""
        self.running.remove(branch)
        self._pool.free(branch.table)
        branch.computed = 0
        self.waiting.appendleft(branch)
        self.num_preemptions += 1

    def _admit(self, plan: Plan, budget: _Budget) -> None:
        """Start waiting branches as long as the first of them fits."""
        while self.waiting and self._fits(self.waiting[0]) and (rows := budget.take(self.waiting[0])):
            branch = self.waiting.popleft()
            self.running.append(branch)
            branch.request.stopwatch.start()
            self._place(plan, branch, rows)

    def _fits(self, branch: Branch) -> bool:
        """Whether there are seats, and blocks for all its tokens and for one more block of every running branch.

        The margin keeps a branch from being preempted as soon as it is admitted. A branch alone fits always.
        """
        if not self.running:
            return True
        seats = sum(1 + len(b.siblings) for b in (*self.running, branch))
        promised = sum(max(0, self._needs(b) - len(b.table)) for b in self.running)
        margin = len(self.running)
        return seats <= self._config.max_num_seqs and self._needs(branch) + promised + margin <= self._pool.num_free

    def _needs(self, branch: Branch) -> int:
        """Blocks that hold the known tokens and the next, with a last block of its own for every sibling to come."""
        return self._pool.blocks_for(len(branch.known) + 1) + len(branch.siblings)

    def _give_room(self, plan: Plan, budget: _Budget) -> None:
        """Share what is left among the branches that draw, for guesses: never at the cost of a branch.

        A branch that is about to fork gets none, since its draws go different ways.
        """
        guessing = [part for part in plan.parts if part.draws and not part.branch.siblings] if self._max_nodes else []
        for i, part in enumerate(guessing):
            branch, end = part.branch, part.branch.computed + part.forced
            share = min(budget.rows, budget.logit_rows) // (len(guessing) - i)
            slots = (len(branch.table) + self._pool.num_free) * self._pool.block_size - end
            useful = branch.request.limit - len(branch.known) - 1  # the last token needs no guess
            part.room = max(0, min(share, slots, useful, self._max_nodes))
            plan.copies.extend(self._pool.reserve(branch.table, end, part.room) or ())
            budget.rows -= part.room
            budget.logit_rows -= part.room
