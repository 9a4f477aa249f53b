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

**Beams go together.** Those of one request are chosen among each other, so they draw in the same step or not at all, and give
way together. When they come back, one of them computes what they have in common before the others fork off. The blocks that
these will need are kept from newcomers, not from those that run, so here a branch may have to give way before it has drawn.
"""

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from math import inf
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
    """Rows of decided tokens. Their slots are reserved."""
    draws: bool
    """Whether they reach the end of what is known, so that the next token can be drawn."""
    room: int = 0
    """Slots reserved beyond those: for the nodes of a guess, or for more steps in a row."""
    guess: Guess = NO_GUESS
    first_logit: int = 0
    """Index of its first row among the step's rows with logits: first those that score the prompt, then those that draw."""
    first_draw: int = 0

    @property
    def forks(self) -> bool:
        """Whether the branch's siblings go their own ways after these rows."""
        return bool(self.branch.siblings) and self.forced == self.branch.due

    @property
    def is_plain(self) -> bool:
        """Whether it is one row, without a guess, from which one token is drawn."""
        alone = self.forced == 1 and self.draws and not self.room and not self.branch.may_fork
        return alone and self.branch.output.finish_reason is None

    @property
    def most_guessed(self) -> int:
        """Guess nodes that are of use: none where the branch may fork, since its draws go different ways, nor for the last token."""
        return self.branch.request.limit - len(self.branch.known) - 1 if self.draws and not self.branch.may_fork else 0


class Plan(NamedTuple):
    """A step to be: its parts, and the block copies to make before it."""

    parts: list[Part]
    copies: list[BlockCopy]


@dataclass
class _Budget:
    """What is left of a step."""

    rows: int
    chunk_work: float
    """For prompts and replays, in rows at the beginning of a context."""
    logit_rows: int
    """Beyond the one that every branch may have."""
    balance: float
    """Context with which a row costs two such rows."""

    def take(self, branch: Branch, most: int) -> int:
        """As many of the branch's next `most` rows as there is room for."""
        cost = 1 + branch.computed / self.balance
        rows = min(most, self.rows, max(1, int(self.chunk_work / cost)) if self.chunk_work > 0 else 0)
        wanted = branch.prompt_rows(rows)
        if len(wanted) > self.logit_rows:
            rows, wanted = wanted.start - branch.computed + self.logit_rows, wanted[: self.logit_rows]
        self.rows -= rows
        self.chunk_work -= rows * cost
        self.logit_rows -= len(wanted)
        return rows


class Scheduler:
    """Continuous batching under a budget of rows, with a prefix cache and recompute preemption."""

    def __init__(self, pool: BlockPool, config: EngineConfig, window: int = 0, balance: float = inf) -> None:
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
        self._window = window
        self._balance = balance
        self._num_steps = 0
        self._left = _Budget(0, 0, 0, inf)
        """Of the step that was planned last."""

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
            sibling.computed, sibling.node, sibling.num_admitted = branch.computed, branch.node, branch.num_admitted
            sibling.table = self._pool.fork(branch.table)
            insort(self.running, sibling, key=_RANK)
        return [branch, *siblings]

    def succeed(self, branches: list[Branch], sources: list[Branch]) -> list[Branch]:
        """Put the heirs of running branches that draw together in their place: one for each source, best first.

        A branch that is the source of several is forked; one that is the source of none is freed.
        """
        left = Counter(sources)
        for branch in branches:
            if branch not in left:
                self._release(branch)
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
        self._num_steps += 1
        for branch in self.running:
            self._remember(branch)
            if self._window:
                self._pool.forgo(branch.table, branch.computed + 1 - self._window)
        while len(self.running) > self._config.max_num_seqs:  # siblings were born
            self._preempt(self.running[-1])
        plan = Plan([], [])
        budget, groups = self._share_rows()
        self._left = budget
        for rows in groups:
            if next(iter(rows)).table:  # else they have given way
                self._place(plan, rows)
        self._admit(plan, budget)
        return plan

    def make_room(self, wanted: dict[Part, int]) -> list[BlockCopy]:
        """Share what is left of the step among parts that want so many guess nodes: never at the cost of a branch.

        Returns the block copies to make.
        """
        copies: list[BlockCopy] = []
        left = min(self._left.rows, self._left.logit_rows)
        for i, part in enumerate(sorted(wanted, key=wanted.__getitem__)):  # what one leaves goes to those that want more
            branch, end = part.branch, part.branch.computed + part.forced
            slots = (len(branch.table) + self._pool.num_free) * self._pool.block_size - end
            part.room = max(0, min(wanted[part], left // (len(wanted) - i), slots))
            copies += self._pool.reserve(branch.table, end, part.room) or ()
            left -= part.room
        return copies

    def reserve_ahead(self, parts: list[Part], most: int) -> int:
        """Reserve slots for as many steps in a row, up to `most`, as there are blocks for; one step has its slots already.

        What is left over is given back with the room for guesses, of which such parts have none.
        """
        pool = self._pool
        while most > 1:
            ends = [part.branch.computed + most for part in parts]
            if sum(max(0, pool.blocks_for(end) - len(part.branch.table)) for end, part in zip(ends, parts, strict=True)) <= pool.num_free:
                for part in parts:
                    part.room = most - 1
                    pool.reserve(part.branch.table, part.branch.computed, most)
                break
            most //= 2
        return most

    def _share_rows(self) -> tuple[_Budget, list[dict[Branch, int]]]:
        """What is left of the step, and the forced rows of the running branches, by rank, those that draw together in one group.

        Groups that decode go first, then chunks; the first gets one row at least.
        """
        config = self._config
        groups = [dict.fromkeys(group, 0) for _, group in groupby(self.running, lambda branch: branch.joined)]
        decoding = [group for group in groups if all(branch.missing == 1 for branch in group)]
        chunked = [group for group in groups if any(branch.missing > 1 for branch in group)]
        kept_free = 1 if chunked and chunked[0] is groups[0] else 0
        left = config.max_step_rows
        for group in decoding:
            if len(group) <= left - kept_free:
                group.update(dict.fromkeys(group, 1))
                left -= len(group)
        budget = _Budget(left, left, config.max_logit_rows, inf)
        if decoding:
            budget.chunk_work, budget.balance = config.chunk_rows + config.max_step_rows - left, self._balance
        for group in chunked:
            last = 1 if len(group) > 1 else 0  # the row that draws waits until all can
            for branch in group:
                group[branch] = budget.take(branch, branch.due - last)
        return budget, groups

    def _place(self, plan: Plan, rows: dict[Branch, int]) -> None:
        """Reserve slots for a group, at the cost of others if need be, or give way."""
        copies: list[BlockCopy] = []
        rows = {branch: num_rows for branch, num_rows in rows.items() if num_rows}
        for branch, num_rows in rows.items():
            while (more := self._pool.reserve(branch.table, branch.computed, num_rows)) is None:
                victim = self._victim(branch)
                self._preempt(victim)
                if victim.joined is branch.joined:
                    return
            copies += more
        plan.parts.extend(Part(branch, num_rows, num_rows == branch.missing) for branch, num_rows in rows.items())
        plan.copies.extend(copies)

    def _victim(self, needy: Branch) -> Branch:
        """Who gives way, `needy` itself or one after it: the last that has drawn since it was admitted, or, to the first, the last."""
        after = self.running[self.running.index(needy) :]
        drawn = [branch for branch in after if branch.has_drawn]
        return drawn[-1] if drawn and drawn[-1].joined is not self.running[0].joined else after[-1]

    def _preempt(self, victim: Branch) -> None:
        """Take the blocks away and let the branch wait; tokens that the cache does not keep are computed again later.

        All that draw with it share its fate.
        """
        group = [branch for branch in self.running if branch.joined is victim.joined]
        for branch in group:
            self.running.remove(branch)
            self._release(branch)
            branch.computed = 0
        first, *others = group
        if others:
            first.siblings, first.fork_at = others, _common_length(group)
        insort(self.waiting, first, key=_RANK)
        self.num_preemptions += len(group)

    def _admit(self, plan: Plan, budget: _Budget) -> None:
        """Start waiting branches as long as the first of them fits."""
        while self.waiting and budget.rows > 0 and budget.chunk_work > 0:
            branch = self.waiting[0]
            if not self._has_seat(branch):
                return
            node = self._find(branch)
            path = node.path() if node else []
            if not self._fits(branch, path):
                return
            self._start(self.waiting.pop(0), node, path)
            self._place(plan, {branch: budget.take(branch, branch.due)})

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

    def _has_seat(self, branch: Branch) -> bool:
        """Whether steps are fast enough for another branch, and few enough run. A branch alone has one always."""
        seats = sum(b.width for b in (*self.running, branch))
        return not self.running or (self.pace.allows and seats <= self._config.max_num_seqs)

    def _fits(self, branch: Branch, path: list[int]) -> bool:
        """Whether there are blocks for all its tokens beside one more for every running branch. A branch alone fits always.

        The margin keeps others from giving way as soon as it is admitted.
        """
        if not self.running:
            return True
        promised = sum(max(0, self._needs(b) - len(b.table)) for b in self.running)
        blocks = self._needs(branch) - self._pool.num_held(path) + promised + len(self.running)
        return blocks <= self._pool.num_free

    def _needs(self, branch: Branch) -> int:
        """Blocks that hold the known tokens and the next, and for every branch to come of it as many as it will not share."""
        whole = self._pool.blocks_for(len(branch.known) + 1)
        return whole + (branch.width - 1) * (whole - branch.fork_at // self._pool.block_size)

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


def _common_length(branches: list[Branch]) -> int:
    """Known tokens that the branches, no two of which are alike, have in common."""
    columns = zip(*(branch.known for branch in branches), strict=True)
    return next(i for i, tokens in enumerate(columns) if len(set(tokens)) > 1)
