"""The loop. A step is launched (schedule, propose, build, run) and finished (accept, commit, observe, emit)."""

from dataclasses import dataclass
from typing import NamedTuple

from headrace.backend import Executable
from headrace.batch import Commit, StepRows
from headrace.engine.build import build
from headrace.engine.multi_step import MultiStep
from headrace.engine.output import TokenizerView
from headrace.engine.resolve import land_plain, resolve_step
from headrace.engine.scheduler import ScheduledSequence, Scheduler
from headrace.engine.sequence import Request, Sequence
from headrace.engine.speculation import Speculation
from headrace.kv.manager import Copy, KvManager
from headrace.kv.rows import move_slots
from headrace.request import FinishReason, Update


class InFlightStep(NamedTuple):
    """A step that has been launched and not yet finished."""

    scheduled: list[ScheduledSequence]
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
    speculation: Speculation
    executable: Executable
    kv: KvManager
    tokenizer: TokenizerView
    multi_step: MultiStep
    num_steps: int = 0
    num_rows: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def launch(self) -> InFlightStep | None:
        """Start the next step; None when there is nothing to do."""
        scheduled, copies = self.scheduler.schedule()
        if not scheduled:
            return None
        copies += self.scheduler.grant_draft_budgets(self.speculation.ask(scheduled))
        move_slots(self.executable, self.kv.slots_of(copies))  # before a proposer writes to the new blocks
        self.speculation.draft()
        most = self.multi_step.plan(scheduled)
        batch = build(scheduled, self.kv.block_size)
        if most:
            rows, commits, num_steps = self.multi_step.run(scheduled, batch, most, self.speculation.rest)
        else:
            rows, commits, num_steps = self.executable.run(batch), None, 1
        flight = InFlightStep(scheduled, rows, commits, num_steps, len(batch.tokens))
        self.num_steps += num_steps
        self.num_rows += num_steps * flight.num_rows
        self.num_drafted += sum(len(item.draft.tokens) for item in scheduled)
        return flight

    def finish(self, flight: InFlightStep) -> list[Update]:
        """Keep what the step got right, and say what is new."""
        if flight.commits is None:
            resolved, failed = resolve_step(flight.scheduled, flight.rows.logits, self.executable.pool, self.scheduler, self.tokenizer)
        else:
            resolved, failed = land_plain(flight.scheduled, flight.commits)
        for request, error in failed:
            self._fail(request, error)
        kept = [one for one in resolved if one.seq.output.finish_reason is None]  # or its request has failed
        move_slots(self.executable, [move for one in kept for move in self._commit(*one)])
        self.speculation.observe(flight.scheduled, [commit for _, _, commit in kept], flight.rows, flight.num_rows, flight.num_steps)
        for seq, _, commit in kept:
            if commit.tokens and seq.receive(commit):
                self.scheduler.drop(seq)
        return [update for request in dict.fromkeys(item.seq.request for item in flight.scheduled) for update in request.news()]

    def end(self, request: Request, reason: FinishReason, message: str | None = None) -> None:
        """End what still goes on of a request, and free what it holds."""
        for seq in request.seqs:
            if seq.output.finish_reason is None:
                seq.output.finish(reason, message)
                self.scheduler.drop(seq)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = request.error or error
        self.end(request, "error", str(error))

    def _commit(self, seq: Sequence, item: ScheduledSequence, commit: Commit) -> list[Copy]:
        """Keep the scheduled rows and the accepted path, rewind the rest; returns the slots to move."""
        end = seq.computed + item.num_scheduled
        seq.computed = end + len(commit.path)
        seq.known += commit.tokens
        self.num_accepted += len(commit.path)
        return self.kv.keep(seq.tables, end, commit.path) if item.budget else []
