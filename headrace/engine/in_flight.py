"""A launched step that has not been finished."""

from dataclasses import dataclass, field

from headrace.acceptors import Acceptor
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.sequence import Sequence
from headrace.logit_ops import LogitOp, Ticket
from headrace.speculation.manager import StepDrafts


@dataclass(slots=True, eq=False)
class InFlightStep:
    scheduled: list[ScheduledSequence]
    drafts: StepDrafts[ScheduledSequence] | None
    """None while speculation is paused."""
    started: float
    """Seconds of the engine's clock, before scheduling."""
    host_seconds: float = 0.0
    """Seconds outside the launches."""
    logit_ops: list[LogitOp] = field(default_factory=list)
    """Ops that score or pool prompts, then ops that sample, in the order of `groups`."""
    groups: dict[Acceptor, list[ScheduledSequence]] = field(default_factory=dict)
    num_ops: dict[Acceptor, int] = field(default_factory=dict)
    """Ops that sample, by acceptor."""
    seqs: list[Sequence] = field(default_factory=list)
    num_rows: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    is_plain: bool = False

    @property
    def needs_logits(self) -> bool:
        return any(acceptor.needs_logits for acceptor in self.groups)
