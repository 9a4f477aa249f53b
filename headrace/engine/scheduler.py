"""Who is in the next step, with how many rows, and which slots they write.

There are no phases: every branch has known tokens without KV (one while it decodes, many in a prompt or after preemption),
and a step computes some of them.

**One order.** Everything goes by `Branch.rank`: the step at which its request came, a level of priority counting as
`STEPS_PER_PRIORITY` steps, then its key. Whoever waits grows more urgent as the steps go by, beside those who come later; no
rank ever changes.

**Everybody finishes.** Take the branch of the lowest rank of all. If it runs, it has a row in every step and never gives way:
who gives way comes last among those running, so it would have to be alone, and alone every request fits, or it would have been
refused. If it waits, nobody is admitted before it, and those that run end in the same way, the first of them first; at the
latest it is alone then, and is admitted. So it ends, and another is the lowest. Only finitely many ever come before a branch:
besides those that were there, those that came within `STEPS_PER_PRIORITY` x (difference of priorities) steps after it.

**Nobody gives way twice for nothing.** A branch is admitted when there are blocks for all its known tokens, and has them at
once, so it needs no other before it has drawn a token. Only who has drawn since it was admitted gives way, unless the first
needs a block and nobody else has drawn yet; that happens at most once for each block that the first grows by.
"""

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from headrace.batch import NO_GUESS, Guess
from headrace.config import EngineConfig
from headrace.engine.branch import Branch
from headrace.engine.pace import Pace
from headrace.kv.blocks import BlockCopy, BlockPool
from headrace.kv.prefix import Node, PrefixCache

STEPS_PER_PRIORITY = 1000
"""How many steps later a request must have come to be as urgent as one of the next level of priority."""

_RANK = attrgetter("rank")


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
    """A step to be: its parts, and the block copies to make before it."""

    parts: list[Part]
    copies: list[BlockCopy]


@dataclass
class _Budget:
    """What is left of a step."""

    rows: int
    chunk_rows: int
    """Of those, for prompts and replays."""
    logit_rows: int
    """Beyond the one that every branch may have."""

    def take(self, branch: Branch) -> int:
        """As many of the branch's missing rows as there is room for."""
        rows = min(branch.missing, self.rows, self.chunk_rows)
        wanted = branch.prompt_rows(rows)
        if len(wanted) > self.logit_rows:
            rows, wanted = wanted.start - branch.computed + self.logit_rows, wanted[: self.logit_rows]
        self.rows -= rows
        self.chunk_rows -= rows
        self.logit_rows -= len(wanted)
        return rows


class Scheduler:
    """Continuous batching under a budget of rows, with a prefix cache and recompute preemption."""

    def __init__(self, pool: BlockPool, config: EngineConfig, max_nodes: int, window: int = 0) -> None:
        self.waiting: list[Branch] = []
        self.running: list[Branch] = []
        """Both by rank. A branch that runs has blocks for all its known tokens, and for those only that it computed KV."""
        self.pace = Pace(config.target_token_ms)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of all requests that were admitted."""
        self.num_cached_tokens = 0
        """Those of them that came from the cache."""
        self._pool = pool
        self._cache = PrefixCache(pool) if config.prefix_cache else None
        self._config = config
        self._max_nodes = max_nodes
        self._window = window
        self._num_steps = 0

    def add(self, branch: Branch) -> None:
        """Queue the first branch of a request."""
        branch.request.arrival = self._num_steps + STEPS_PER_PRIORITY * branch.request.service.priority
        insort(self.waiting, branch, key=_RANK)

    def drop(self, branch: Branch) -> None:
        """Forget a branch, whatever its state, and free what it holds."""
        for queue in (self.running, self.waiting):
            if branch in queue:
                queue.remove(branch)
        self._release(branch)

    def fork(self, branch: Branch) -> list[Branch]:
        """The branch and its siblings, which from now on run beside it on the same blocks."""
        siblings, branch.siblings = branch.siblings, []
        for sibling in siblings:
            sibling.known, sibling.computed, sibling.node = list(branch.known), branch.computed, branch.node
            sibling.table = self._pool.fork(branch.table)
            insort(self.running, sibling, key=_RANK)
        return [branch, *siblings]

    def schedule(self) -> Plan:
        """Choose the parts of the next step and reserve their slots."""
        self._num_steps += 1
        for branch in self.running:
            self._remember(branch)
            if self._window:
                self._pool.forgo(branch.table, branch.computed + 1 - self._window)
        while len(self.running) > self._config.max_num_seqs:  # siblings were born
            self._preempt(self.running[-1])
        plan = Plan([], [])
        budget, rows = self._share_rows()
        for branch in [*self.running]:
            if (num_rows := rows.get(branch)) and branch.table:  # else it has given way
                self._place(plan, branch, num_rows)
        self._admit(plan, budget)
        self._give_room(plan, budget)
        return plan

    def _share_rows(self) -> tuple[_Budget, dict[Branch, int]]:
        """Forced rows of the running branches, and what is left: those that decode go first, then chunks; the first gets one at least."""
        decoding: list[Branch] = []
        chunked: list[Branch] = []
        for branch in self.running:
            (decoding if branch.missing == 1 else chunked).append(branch)
        config = self._config
        kept_free = 1 if chunked and chunked[0] is self.running[0] else 0
        rows = dict.fromkeys(decoding[: config.max_step_rows - kept_free], 1)
        left = config.max_step_rows - len(rows)
        chunk_rows = max(config.chunk_rows, len(decoding)) if decoding else left
        budget = _Budget(left, chunk_rows, config.max_logit_rows)
        for branch in chunked:
            rows[branch] = budget.take(branch)
        return budget, rows

    def _place(self, plan: Plan, branch: Branch, rows: int) -> None:
        """Reserve slots, at the cost of others if need be, or give way."""
        while (copies := self._pool.reserve(branch.table, branch.computed, rows)) is None:
            victim = self._victim(branch)
            self._preempt(victim)
            if victim is branch:
                return
        plan.parts.append(Part(branch, rows, rows == branch.missing))
        plan.copies.extend(copies)

    def _victim(self, needy: Branch) -> Branch:
        """Who gives way, `needy` itself or one after it: the last that has drawn since it was admitted, or, to the first, the last."""
        after = self.running[self.running.index(needy) :]
        drawn = [branch for branch in after if branch.has_drawn]
        return drawn[-1] if drawn and drawn[-1] is not self.running[0] else after[-1]

    def _preempt(self, branch: Branch) -> None:
        """Take the blocks away and let the branch wait; tokens that the cache does not keep are computed again later."""
        self.running.remove(branch)
        self._release(branch)
        branch.computed = 0
        insort(self.waiting, branch, key=_RANK)
        self.num_preemptions += 1

    def _admit(self, plan: Plan, budget: _Budget) -> None:
        """Start waiting branches as long as the first of them fits."""
        while self.waiting and budget.rows > 0 and budget.chunk_rows > 0:
            branch = self.waiting[0]
            node = self._find(branch)
            path = node.path() if node else []
            if not self._fits(branch, path):
                return
            self._start(self.waiting.pop(0), node, path)
            if rows := budget.take(branch):
                self._place(plan, branch, rows)

    def _start(self, branch: Branch, node: Node | None, path: list[int]) -> None:
        """Give a branch the blocks of all its known tokens: those of `path`, which are computed, then others."""
        insort(self.running, branch, key=_RANK)
        branch.node, branch.computed = node, len(path) * self._pool.block_size
        branch.num_admitted = len(branch.known)
        self._pool.share(branch.table, path)
        self._pool.reserve(branch.table, branch.computed, branch.missing)
        request = branch.request
        if request.stopwatch.start():
            request.cached_tokens = branch.computed
            self.num_prompt_tokens += branch.prompt_len
            self.num_cached_tokens += branch.computed
        self.pace.admit()

    def _fits(self, branch: Branch, path: list[int]) -> bool:
        """Whether steps are fast enough, and there are seats, and blocks for all its tokens beside one more for every running branch.

        The margin keeps others from giving way as soon as it is admitted. A branch alone fits always.
        """
        if not self.running:
            return True
        seats = sum(1 + len(b.siblings) for b in (*self.running, branch))
        promised = sum(max(0, self._needs(b) - len(b.table)) for b in self.running)
        blocks = self._needs(branch) - self._pool.num_held(path) + promised + len(self.running)
        return self.pace.allows and seats <= self._config.max_num_seqs and blocks <= self._pool.num_free

    def _needs(self, branch: Branch) -> int:
        """Blocks that hold the known tokens and the next, with a last block of its own for every sibling to come."""
        return self._pool.blocks_for(len(branch.known) + 1) + len(branch.siblings)

    def _find(self, branch: Branch) -> Node | None:
        """The end of what the cache has of a branch."""
        if self._cache is None:
            return None
        return self._cache.find(branch.request.scope, branch.known, branch.most_cached)

    def _remember(self, branch: Branch) -> None:
        """Let the cache know the blocks that were filled."""
        if self._cache is not None and branch.node is not None:
            branch.node = self._cache.extend(branch.node, branch.table, branch.known, branch.computed)

    def _release(self, branch: Branch) -> None:
        self._remember(branch)
        self._pool.free(branch.table)
        branch.node = None

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
