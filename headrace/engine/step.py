"""The loop. A step is launched (schedule, propose, build, run) and finished (accept, commit, observe, emit)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.backend import Executable
from headrace.batch import Commit, StepRows
from headrace.engine.ahead import Ahead
from headrace.engine.branch import Branch, Request
from headrace.engine.build import build
from headrace.engine.guessing import Guessing
from headrace.engine.landing import land, land_plain
from headrace.engine.output import TokenizerView
from headrace.engine.scheduler import Part, Scheduler
from headrace.kv.blocks import BlockPool
from headrace.request import FinishReason, Update


class Flight(NamedTuple):
    """A step that has been launched and not yet finished."""

    parts: list[Part]
    rows: StepRows
    commits: list[Commit | None] | None
    """Of plain decoding, for each part, which may be of several steps; None: its logits were not finite."""
    num_steps: int
    num_rows: int
    """Of each."""


@dataclass
class Stepper:
    """All that takes part in a step, and what all steps so far came to."""

    scheduler: Scheduler
    guessing: Guessing
    executable: Executable
    pool: BlockPool
    tokenizer: TokenizerView
    ahead: Ahead
    num_steps: int = 0
    num_rows: int = 0
    num_guessed: int = 0
    num_accepted: int = 0

    def launch(self) -> Flight | None:
        """Start the next step; None when there is nothing to do."""
        parts, copies = self.scheduler.schedule()
        if not parts:
            return None
        copies += self.scheduler.make_room(self.guessing.ask(parts))
        self._move(self.pool.slots_of(copies))  # before a proposer writes to the new blocks
        self.guessing.guess()
        most = self.ahead.plan(parts)
        batch = build(parts, self.pool)
        if most:
            rows, commits, num_steps = self.ahead.run(parts, batch, most, self.guessing.rest)
        else:
            rows, commits, num_steps = self.executable.run(batch), None, 1
        flight = Flight(parts, rows, commits, num_steps, len(batch.tokens))
        self.num_steps += num_steps
        self.num_rows += num_steps * flight.num_rows
        self.num_guessed += sum(len(part.guess.tokens) for part in parts)
        return flight

    def finish(self, flight: Flight) -> list[Update]:
        """Keep what the step got right, and say what is new."""
        if flight.commits is None:
            landing, failed = land(flight.parts, flight.rows.logits, self.executable.pool, self.scheduler, self.tokenizer)
        else:
            landing, failed = land_plain(flight.parts, flight.commits)
        for request, error in failed:
            self._fail(request, error)
        kept = [one for one in landing if one.branch.output.finish_reason is None]  # or its request has failed
        self._move([move for one in kept for move in self._commit(*one)])
        self.guessing.observe(flight.parts, [commit for _, _, commit in kept], flight.rows, flight.num_rows, flight.num_steps)
        for branch, _, commit in kept:
            if commit.tokens and branch.receive(commit):
                self.scheduler.drop(branch)
        return [update for request in dict.fromkeys(part.branch.request for part in flight.parts) for update in request.news()]

    def end(self, request: Request, reason: FinishReason, message: str | None = None) -> None:
        """End what still goes on of a request, and free what it holds."""
        for branch in request.branches:
            if branch.output.finish_reason is None:
                branch.output.finish(reason, message)
                self.scheduler.drop(branch)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = request.error or error
        self.end(request, "error", str(error))

    def _commit(self, branch: Branch, part: Part, commit: Commit) -> list[tuple[int, int]]:
        """Keep the forced rows and the accepted path, rewind the rest; returns the slots to move."""
        end = branch.computed + part.forced
        branch.computed = end + len(commit.path)
        branch.known += commit.tokens
        self.num_accepted += len(commit.path)
        return self.pool.keep(branch.table, end, commit.path) if part.room else []

    def _move(self, moves: list[tuple[int, int]]) -> None:
        if moves:
            self.executable.move_slots(*np.array(moves, np.int32).T)
