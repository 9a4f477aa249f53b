"""Records of a step that has been launched and not yet finished."""

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.acceptors import Acceptor, Drawing
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.sequence import Sequence
from headrace.logit_ops import LogitOp, Ticket
from headrace.speculation.manager import StepDrafts


class Member(NamedTuple):
    """A sequence that draws in a step."""

    seq: Sequence
    item: ScheduledSequence
    drawing: Drawing


@dataclass(slots=True, eq=False)
class StepOps:
    """The logit ops of a step, and the sequences that they belong to."""

    ops: list[LogitOp] = field(default_factory=list)
    first_score_row: dict[ScheduledSequence, int] = field(default_factory=dict)
    """Index of the first op that scores the prompt of a scheduled sequence."""
    pools: dict[ScheduledSequence, int] = field(default_factory=dict)
    """Index of the op that pools rows of a scheduled sequence."""
    groups: dict[Acceptor, list[Member]] = field(default_factory=dict)
    """The sequences that draw, by acceptor; their ops follow those on prompts, in this order."""
    seqs: list[Sequence] = field(default_factory=list)
    """All sequences of the step, and those that were forked from them in it."""

    @property
    def needs_logits(self) -> bool:
        """Whether an acceptor of the step reads the logits themselves."""
        return any(acceptor.needs_logits for acceptor in self.groups)


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that has been launched and not yet finished."""

    scheduled: list[ScheduledSequence]
    drafting: StepDrafts[ScheduledSequence] | None
    """The drafts of the step; None while speculation is paused."""
    ops: StepOps
    tickets: list[Ticket]
    """A ticket for each launch; several in multi-step decoding."""
    num_rows: int
    """Rows of each launch."""
    begun: float
    """Clock, in seconds, when the engine turned to it, before scheduling and drafting."""
    is_plain: bool
    """Whether it is plain decoding, in one launch or several."""
