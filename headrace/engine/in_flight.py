"""The record of a launched step that has not been finished."""

from dataclasses import dataclass, field

from headrace.acceptors import Acceptor
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.sequence import Sequence
from headrace.logit_ops import LogitOp, Ticket
from headrace.speculation.manager import StepDrafts


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A launched step that has not been finished."""

    scheduled: list[ScheduledSequence]
    drafts: StepDrafts[ScheduledSequence] | None
    """The drafts of the step; None while speculation is paused."""
    started: float
    """Clock, in seconds, before the step was scheduled."""
    logit_ops: list[LogitOp] = field(default_factory=list)
    """First the ops that score or pool prompts, then the ops that sample, in the order of `groups`.
    """
    groups: dict[Acceptor, list[ScheduledSequence]] = field(default_factory=dict)
    """The sequences that sample, by acceptor."""
    seqs: list[Sequence] = field(default_factory=list)
    """All sequences of the step, and the sequences that the step forked from them."""
    num_rows: int = 0
    """Rows of each launch."""
    tickets: list[Ticket] = field(default_factory=list)
    """One ticket for each launch; multi-step decoding has several."""
    is_plain: bool = False
    """Whether the step is plain decoding: one row and one sampled token for each sequence."""

    @property
    def needs_logits(self) -> bool:
        """Whether an acceptor of the step reads the logits themselves."""
        return any(acceptor.needs_logits for acceptor in self.groups)
