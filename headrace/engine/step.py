"""The loop. A step is launched (schedule, propose, build, run) and finished (accept, commit, observe, emit)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.accept.descend import descend
from headrace.backend import Executable
from headrace.batch import Commit, Proposer, StepRows
from headrace.engine.branch import Branch, Request
from headrace.engine.build import build
from headrace.engine.output import TokenizerView, prompt_logprobs
from headrace.engine.scheduler import Part, Scheduler
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
    num_steps: int = 0
    num_rows: int = 0
    num_guessed: int = 0
    num_accepted: int = 0

    def launch(self) -> Flight | None:
        """Start the next step; None when there is nothing to do."""
        parts, copies = self.scheduler.schedule()
        if not parts:
            return None
        guesses = self.proposer.propose([part.branch for part in parts], [part.room for part in parts])
        for part, guess in zip(parts, guesses, strict=True):
            part.guess = guess
        batch = build(parts, self.pool)
        self._move(self.pool.slots_of(copies))
        self.num_steps += 1
        self.num_rows += len(batch.tokens)
        self.num_guessed += sum(len(guess.tokens) for guess in guesses)
        return Flight(parts, self.executable.run(batch))

    def finish(self, flight: Flight) -> list[Update]:
        """Keep what the step got right, and say what is new."""
        kept: list[tuple[Branch, Commit]] = []
        moves: list[tuple[int, int]] = []
        updates: list[Update] = []
        for source, part in enumerate(flight.parts):
            if part.branch.output.finish_reason:  # aborted in flight, or failed with another branch of its request
                continue
            try:
                accepted = self._accept(source, part, flight.rows)
            except Exception as error:  # a request can end itself, never the engine
                part.branch.request.error = error
                updates += self.end(part.branch.request, "error", str(error))
                continue
            moves += [move for branch, commit in accepted for move in self._commit(branch, part.forced, commit)]
            kept += accepted
        self._move(moves)
        self.proposer.observe([part.branch for part in flight.parts], [commit for _, commit in kept], flight.rows)
        return updates + [update for branch, commit in kept for update in self._emit(branch, commit)]

    def end(self, request: Request, reason: FinishReason, message: str | None = None) -> list[Update]:
        """End what still goes on of a request, and free what it holds."""
        updates = []
        for branch in request.branches:
            if branch.output.finish_reason is None:
                branch.output.finish(reason, message)
                self.scheduler.drop(branch)
                updates.append(branch.update())
        return updates

    def _accept(self, source: int, part: Part, rows: StepRows) -> list[tuple[Branch, Commit]]:
        """One commit for each branch that draws from the part's rows, or one without tokens inside a prompt."""
        branch, request, params = part.branch, part.branch.request, part.branch.request.params
        first, logits = part.first_logit, rows.logits
        if prompt := branch.prompt_rows(part.forced):
            tokens = branch.known[prompt.start + 1 : prompt.stop + 1]
            scored = logits[first : first + len(prompt)]
            request.prompt_logprobs += prompt_logprobs(self.tokenizer, tokens, scored, params.prompt_logprobs or 0)
        if not part.draws:
            return [(branch, Commit(source, [], [], []))]
        logits = logits[first + len(prompt) :]
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        drawing = self.scheduler.fork(branch)
        return [(b, descend(source, b.sampler, part.guess, logits, len(b.known), num_logprobs)) for b in drawing]

    def _commit(self, branch: Branch, forced: int, commit: Commit) -> list[tuple[int, int]]:
        """Keep the forced rows and the accepted path, rewind the rest; returns the slots to move."""
        end = branch.computed + forced
        branch.computed = end + len(commit.path)
        branch.known += commit.tokens
        self.num_accepted += len(commit.path)
        return self.pool.keep(branch.table, end, commit.path)

    def _emit(self, branch: Branch, commit: Commit) -> list[Update]:
        """What is new in a branch that drew."""
        if branch.output.finish_reason or not commit.tokens:
            return []
        if branch.receive(commit):
            self.scheduler.drop(branch)
        return [branch.update()]

    def _move(self, moves: list[tuple[int, int]]) -> None:
        if moves:
            self.executable.move_slots(*np.array(moves, np.int32).T)
