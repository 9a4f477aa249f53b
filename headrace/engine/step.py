"""The step loop. A step is launched (schedule, draft, build, launch) and finished (wait, accept,
commit, observe, emit).
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from headrace.backend import Executable
from headrace.engine.build import build
from headrace.engine.ending import fail, receive
from headrace.engine.in_flight import InFlightStep
from headrace.engine.jump_forward import JumpForward
from headrace.engine.multi_step import MultiStep
from headrace.engine.output import TokenizerView
from headrace.engine.resolve import Resolved, prepare_logit_ops, resolve_step
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.scheduler import Scheduler
from headrace.kv.manager import Copy, KvManager
from headrace.kv.rows import move_slots, prepare_blocks
from headrace.request import Update
from headrace.speculation.manager import SpeculationManager, StepDrafts


@dataclass
class StepLoop:
    """The parts of an engine that a step passes through, the steps in flight, and counters over all
    steps.
    """

    scheduler: Scheduler
    speculation: SpeculationManager
    executable: Executable
    kv: KvManager
    tokenizer: TokenizerView
    multi_step: MultiStep
    jump_forward: JumpForward
    clock: Callable[[], float]
    in_flight: deque[InFlightStep] = field(default_factory=deque)
    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def launch(self, is_wanted: Callable[[], bool]) -> None:
        """Launch steps until as many are in flight as the executable allows, or the next depends on
        results that are not there yet.

        Multi-step decoding ends where `is_wanted`.
        """
        while not self.in_flight or (
            len(self.in_flight) < self.executable.max_in_flight and self._can_overlap()
        ):
            begun = self.clock()
            output = self.scheduler.schedule()
            if not output.scheduled:
                return prepare_blocks(self.executable, self.kv, output.copies)
            certain = self.jump_forward.find(output.scheduled)
            drafting, wanted = self.speculation.plan(output.scheduled)
            copies = output.copies + self.scheduler.grant_draft_budgets(output, wanted | certain)
            self.jump_forward.draft(certain)
            prepare_blocks(self.executable, self.kv, copies)  # before a proposer writes to them
            if drafting:
                self.speculation.draft(drafting)
            self._launch(output.scheduled, drafting, begun, is_wanted)

    def finish(self, updates: list[Update]) -> InFlightStep:
        """Wait for the oldest step in flight and commit its results; returns the step, and adds the
        updates of its requests.
        """
        step = self.in_flight[0]
        results = [ticket.wait() for ticket in step.tickets]
        self.in_flight.popleft()
        self.multi_step.record(step)
        self.scheduler.finish(step.ops.seqs)
        resolved, failed = resolve_step(step, results, self.scheduler, self.tokenizer)
        for request, error in failed:
            fail(request, error, self.scheduler)
        kept = [
            one for one in resolved if one.seq.output.finish_reason is None
        ]  # its request may have failed
        move_slots(self.executable, [move for one in kept for move in self._commit(one)])
        seconds = self.clock() - step.begun
        commits = [commit for _, _, commit in kept]
        self.speculation.observe(
            step.scheduled,
            step.drafting,
            commits,
            results[-1],
            step.num_rows,
            seconds,
            len(results),
        )
        self.num_tokens += sum(receive(seq, commit, self.scheduler) for seq, _, commit in kept)
        for request in dict.fromkeys(item.seq.request for item in step.scheduled):
            updates += request.news()
        return step

    def forsake(self) -> None:
        """Wait for the steps in flight, and forget them."""
        for ticket in [ticket for step in self.in_flight for ticket in step.tickets]:
            with suppress(Exception):
                ticket.wait()
        self.in_flight.clear()

    def _can_overlap(self) -> bool:
        """Whether the next step can be launched before those in flight are finished."""
        return (
            self.scheduler.can_overlap
            and self.speculation.is_paused
            and not self.in_flight[-1].drafting
        )

    def _launch(
        self,
        scheduled: list[ScheduledSequence],
        drafting: StepDrafts[ScheduledSequence] | None,
        begun: float,
        is_wanted: Callable[[], bool],
    ) -> None:
        most = self.multi_step.plan(scheduled)
        batch = build(scheduled, self.kv.block_size)
        draws = prepare_logit_ops(scheduled, self.scheduler)
        wanted = {
            "logits": draws.needs_logits or self.speculation.needs_logits,
            "hidden": self.speculation.needs_hidden,
        }
        if most:
            tickets = self.multi_step.launch(
                scheduled,
                batch,
                draws.ops,
                most,
                self.speculation.pause_seconds,
                is_wanted,
                **wanted,
            )
        else:
            tickets = [self.executable.launch(batch, draws.ops, **wanted)]
        self.in_flight.append(
            InFlightStep(scheduled, drafting, draws, tickets, len(batch.tokens), begun, most > 0)
        )
        self.num_steps += len(tickets)
        self.num_rows += len(tickets) * len(batch.tokens)
        self.num_drafted += sum(len(item.draft.tokens) for item in scheduled if not item.certain)

    def _commit(self, resolved: Resolved) -> list[Copy]:
        """Keep the KV of the scheduled tokens and of the accepted path, free the rest; returns the
        slots to move.
        """
        seq, item, commit = resolved
        more = max(0, len(commit.tokens) - 1)  # new tokens that have KV
        seq.computed += more - (item.num_launches - 1)
        seq.settled = item.end + more
        seq.known += commit.tokens
        if item.draft_budget:
            self.num_accepted += len(commit.path) - self.jump_forward.count(item, commit)
            return self.kv.keep(seq.tables, item.end, commit.path)
        if item.has_spare_slots:
            self.kv.trim(seq.tables, seq.computed)
        return []
