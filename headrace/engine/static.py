"""Static batching, the baseline that in-flight batching is measured against: a batch starts together and ends together.

As servers did before iteration-level scheduling (Orca, Yu et al. 2022): memory for the longest sequence of the batch is
reserved for each at the start, nobody joins, and who is done goes on taking a row each step, computed and ignored, until the
last one is done. One thing is kinder than it was: padding of short prompts takes slots but no rows, because a ragged step has
no place for rows without a token. So the baseline is a little faster here than a padded one.
"""

from dataclasses import replace
from math import inf

from headrace.config import EngineConfig
from headrace.engine.branch import Branch
from headrace.engine.scheduler import Part, Plan, Scheduler
from headrace.kv.blocks import BlockPool


class StaticScheduler(Scheduler):
    """Whole batches of waiting requests, first come, first served. Never changes a token."""

    def __init__(self, pool: BlockPool, config: EngineConfig, window: int = 0, balance: float = inf) -> None:
        # A batch begins as one, and its prompts are not slowed for the sake of its other members: that would burden the baseline.
        super().__init__(pool, replace(config, chunk_rows=config.max_step_rows, target_token_ms=0), window)
        self._batch: set[Branch] = set()
        self._padded = 0
        """Slots of each member."""

    def drop(self, branch: Branch) -> None:
        """Forget a branch; one that is done stays as padding until all are done."""
        done = [member for member in self.running if member.output.finish_reason]
        crowded = len(done) >= self._config.max_step_rows  # padding would leave no row to the others
        if branch not in done or crowded or branch.output.finish_reason in ("abort", "error", "timeout"):
            super().drop(branch)
        if all(member.output.finish_reason for member in self.running):
            for member in self.running[:]:
                super().drop(member)

    def schedule(self) -> Plan:
        """The rows of the batch; when there is none, of the next one."""
        if not self.running:
            self._form()
        return super().schedule()

    def reserve_ahead(self, parts: list[Part], most: int) -> int:
        """One step: all slots are reserved already, and what is left of them after some steps would be given back."""
        return 1

    def _form(self) -> None:
        """Choose the next batch: as many of the queue as there are seats, and blocks for the longest of them each."""
        self._batch, self._padded, seats = set(), 0, 0
        for branch in self.waiting:
            seats += branch.width
            padded = max(self._padded, branch.request.limit - 1)  # the last token never has KV
            fits = seats <= self._config.max_num_seqs and seats * self._pool.blocks_for(padded) <= self._pool.num_free
            if self._batch and not fits:
                break
            self._batch.add(branch)
            self._padded = padded

    def _fits(self, branch: Branch, path: list[int]) -> bool:
        """Whether the branch is of the batch, for which there are blocks."""
        return branch in self._batch

    def _preempt(self, victim: Branch) -> None:
        if victim.output.finish_reason:  # padding gives way for good
            super().drop(victim)
        else:
            super()._preempt(victim)

    def _place(self, plan: Plan, rows: dict[Branch, int]) -> None:
        """Reserve all that the longest member can come to need; where that fails, a request with many branches is alone."""
        for branch in rows:
            plan.copies.extend(self._pool.reserve(branch.table, branch.computed, self._padded - branch.computed) or ())
        super()._place(plan, rows)
