"""The loop. A step is launched (schedule, propose, build, run) and finished (accept, commit, observe, emit)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.accept.descend import Accept, Descent
from headrace.backend import Executable
from headrace.batch import Commit, Proposer, StepRows
from headrace.engine.branch import Branch, Request
from headrace.engine.build import build
from headrace.engine.output import TokenizerView
from headrace.engine.scheduler import Part, Scheduler
from headrace.errors import NonFiniteLogitsError
from headrace.kv.blocks import BlockPool
from headrace.request import FinishReason, Update


class Flight(NamedTuple):
    """A step that has been launched and not yet finished."""

    parts: list[Part]
    rows: StepRows


@dataclass
class Stepper:
    """All that takes part in a step, and what all steps so far came to."""

    scheduler: Scheduler
    proposer: Proposer
    executable: Executable
    pool: BlockPool
    tokenizer: TokenizerView
    accept: Accept
    num_steps: int = 0
    num_rows: int = 0
    num_guessed: int = 0
    num_accepted: int = 0

    def launch(self) -> Flight | None:
        """Start the next step; None when there is nothing to do."""
        parts, copies = self.scheduler.schedule()
        if not parts:
            return None
        self._move(self.pool.slots_of(copies))  # before a proposer writes to the new blocks
        guesses = self.proposer.propose([part.branch for part in parts], [part.room for part in parts])
        for part, guess in zip(parts, guesses, strict=True):
            part.guess = guess
        batch = build(parts, self.pool)
        self.num_steps += 1
        self.num_rows += len(batch.tokens)
        self.num_guessed += sum(len(guess.tokens) for guess in guesses)
        return Flight(parts, self.executable.run(batch))

    def finish(self, flight: Flight) -> list[Update]:
        """Keep what the step got right, and say what is new."""
        landing: list[tuple[Branch, Part, Commit]] = []
        descents: list[Descent] = []
        updates: list[Update] = []
        logits = flight.rows.logits
        for source, part in enumerate(flight.parts):
            if part.branch.output.finish_reason:  # aborted in flight
                continue
            try:
                part.branch.score_prompt(part.forced, logits, part.first_logit, self.tokenizer)
            except Exception as error:  # a request can end itself, never the engine
                updates += self._fail(part.branch.request, error)
                continue
            for branch in self.scheduler.fork(part.branch) if part.draws else (part.branch,):
                commit = Commit(source, [], [], [], part.first_draw if part.draws else -1)
                landing.append((branch, part, commit))
                if part.draws:
                    descents.append(Descent(commit, branch.sampler, part.guess, part.first_draw, len(branch.known), branch.num_logprobs))
        failed = self.accept(descents, logits, self.executable.pool)
        kept: list[tuple[Branch, Commit]] = []
        moves: list[tuple[int, int]] = []
        for branch, part, commit in landing:
            if commit.source in failed:
                updates += self._fail(branch.request, NonFiniteLogitsError("the model produced non-finite logits"))
            if branch.output.finish_reason is None:  # or it failed with another branch of its request
                moves += self._commit(branch, part, commit)
                kept.append((branch, commit))
        self._move(moves)
        self.proposer.observe([part.branch for part in flight.parts], [commit for _, commit in kept], flight.rows)
        return updates + [self._emit(branch, commit) for branch, commit in kept if commit.tokens and not branch.output.finish_reason]

    def end(self, request: Request, reason: FinishReason, message: str | None = None) -> list[Update]:
        """End what still goes on of a request, and free what it holds."""
        updates = []
        for branch in request.branches:
            if branch.output.finish_reason is None:
                branch.output.finish(reason, message)
                self.scheduler.drop(branch)
                updates.append(branch.update())
        return updates

    def _fail(self, request: Request, error: Exception) -> list[Update]:
        request.error = request.error or error
        return self.end(request, "error", str(error))

    def _commit(self, branch: Branch, part: Part, commit: Commit) -> list[tuple[int, int]]:
        """Keep the forced rows and the accepted path, rewind the rest; returns the slots to move."""
        end = branch.computed + part.forced
        branch.computed = end + len(commit.path)
        branch.known += commit.tokens
        self.num_accepted += len(commit.path)
        return self.pool.keep(branch.table, end, commit.path) if part.room else []

    def _emit(self, branch: Branch, commit: Commit) -> Update:
        """What is new in a branch that drew."""
        if branch.receive(commit):
            self.scheduler.drop(branch)
        return branch.update()

    def _move(self, moves: list[tuple[int, int]]) -> None:
        if moves:
            self.executable.move_slots(*np.array(moves, np.int32).T)
