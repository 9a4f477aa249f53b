"""The step loop: schedule, draft, build and launch; then wait, accept and commit.

Steps overlap unless one depends on unfinished results.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.backend import Executable
from headrace.batch import Commit
from headrace.engine.build import build_batch
from headrace.engine.finish import fail_sequences, receive_tokens
from headrace.engine.in_flight import InFlightStep
from headrace.engine.jump_forward import JumpForward
from headrace.engine.multi_step import MultiStep
from headrace.engine.output import TokenizerView
from headrace.engine.request_timer import WorkTimer
from headrace.engine.resolve import prepare_logit_ops, resolve_step
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.scheduler import Scheduler
from headrace.kv.manager import Copy, KvManager
from headrace.kv.rows import move_slots, prepare_blocks
from headrace.logit_ops import StepResult
from headrace.outputs import Update
from headrace.speculation.manager import SpeculationManager

if TYPE_CHECKING:
    from headrace.speculation.learning.learner import DraftLearner


@dataclass
class StepLoop:
    """The parts of the engine that a step passes through, the steps in flight, and counters."""

    scheduler: Scheduler
    speculation: SpeculationManager
    executable: Executable
    kv: KvManager
    tokenizer: TokenizerView
    multi_step: MultiStep
    jump_forward: JumpForward
    clock: Callable[[], float]
    detokeniser: WorkTimer
    learner: "DraftLearner[Any] | None" = None
    in_flight: deque[InFlightStep] = field(default_factory=deque)
    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def launch(self, should_stop: Callable[[], bool]) -> None:
        """Launch steps until enough are in flight, or one depends on unfinished results."""
        while not self.in_flight or self._can_overlap():
            started = self.clock()
            output = self.scheduler.schedule()
            if not output.scheduled:
                prepare_blocks(self.executable, self.kv, output.copies)
                return

            # Find draft tokens: a grammar forces them, or proposers suggest them.
            forced = self.jump_forward.find(output.scheduled)
            drafts, requested = self.speculation.plan(output.scheduled)
            draft_copies = self.scheduler.grant_draft_budgets(output, requested | forced)
            self.jump_forward.draft(forced)

            # Copy shared blocks before a proposer or the step writes to them.
            prepare_blocks(self.executable, self.kv, output.copies + draft_copies)
            if drafts:
                self.speculation.draft(drafts)

            step = InFlightStep(scheduled=output.scheduled, drafts=drafts, started=started)
            self._launch(step, should_stop)

    def _can_overlap(self) -> bool:
        return (
            len(self.in_flight) < self.executable.max_in_flight
            and self.scheduler.can_overlap
            and self.speculation.is_paused
            and not self.in_flight[-1].drafts
        )

    def _launch(self, step: InFlightStep, should_stop: Callable[[], bool]) -> None:
        max_launches = self.multi_step.plan(step.scheduled)
        batch = build_batch(step.scheduled, self.kv.block_size)
        prepare_logit_ops(step, self.scheduler)
        needs_logits = step.needs_logits or self.speculation.needs_logits
        needs_hidden = self.speculation.needs_hidden
        step.host_seconds = self.clock() - step.started

        if max_launches:
            step.is_plain = True
            step.tickets = self.multi_step.launch(
                step.scheduled,
                batch,
                step.logit_ops,
                max_launches=max_launches,
                max_seconds=self.speculation.pause_seconds,
                should_stop=should_stop,
                logits=needs_logits,
                hidden=needs_hidden,
                keeps_taps=self.learner is not None,
            )
        else:
            ticket = self.executable.launch(
                batch, step.logit_ops, logits=needs_logits, hidden=needs_hidden
            )
            step.tickets = [ticket]

        step.num_rows = len(batch.tokens)
        self.in_flight.append(step)
        self.num_steps += len(step.tickets)
        self.num_rows += len(step.tickets) * step.num_rows
        self.num_drafted += sum(
            [len(item.draft.tokens) for item in step.scheduled if not item.forced]
        )

    def finish(self, updates: list[Update]) -> InFlightStep:
        """Finish the oldest step, add its updates to `updates`, and return it."""
        step = self.in_flight[0]
        results = [ticket.wait() for ticket in step.tickets]
        with self.detokeniser:
            self.in_flight.popleft()
            self.multi_step.record(step)
            self.scheduler.finish(step.seqs)
            self._apply(step, results, updates)
        return step

    def _apply(self, step: InFlightStep, results: list[StepResult], updates: list[Update]) -> None:
        started = self.clock()

        # Accept: each sequence that continues gets a commit.
        commits, failures = resolve_step(step, results, self.scheduler, self.tokenizer)
        for seqs, error in failures:
            fail_sequences(seqs, error, self.scheduler)
        # The siblings of a sequence whose prompt failed have ended with it.
        commits = [
            (item, commit) for item, commit in commits if item.seq.output.finish_reason is None
        ]

        # Commit the KV: keep the accepted tokens, free the rejected drafts.
        moves: list[Copy] = []
        for item, commit in commits:
            moves += self._commit(item, commit)
        move_slots(self.executable, moves)

        # Observe: proposers and the controller learn from the step.
        now = self.clock()
        self.speculation.observe(
            step.scheduled,
            step.drafts,
            [commit for _, commit in commits],
            results[-1],
            num_rows=step.num_rows,
            seconds=now - step.started,
            num_launches=len(results),
            host_seconds=step.host_seconds + now - started,
        )
        if self.learner:
            self.learner.observe(commits, results, step.drafts.candidates if step.drafts else {})

        # Append the tokens to the outputs, and collect the new text.
        for item, commit in commits:
            self.num_tokens += receive_tokens(item.seq, commit, self.scheduler)
        for request in dict.fromkeys([item.seq.request for item in step.scheduled]):
            updates += request.new_updates()

    def _commit(self, item: ScheduledSequence, commit: Commit) -> list[Copy]:
        """Keep the KV of scheduled tokens and accepted nodes.

        Returns the slots to move, which makes them adjacent.
        """
        seq = item.seq
        num_more = max(0, len(commit.tokens) - 1)  # the last new token has no KV
        seq.computed += num_more - (item.num_launches - 1)
        seq.settled = item.end + num_more
        seq.known += commit.tokens
        if item.draft_budget:
            self.num_accepted += len(commit.path) - self.jump_forward.count(item, commit)
            return self.kv.keep_path(seq.tables, item.end, commit.path)
        if item.has_spare_slots:
            self.kv.trim(seq.tables, seq.computed)
        return []

    def abandon(self) -> None:
        for step in self.in_flight:
            for ticket in step.tickets:
                with suppress(Exception):
                    ticket.wait()
        self.in_flight.clear()
