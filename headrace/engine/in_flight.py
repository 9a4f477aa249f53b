"""The record of a step that has been launched and not yet finished."""

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.accept import Acceptor, Drawing
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.sequence import Sequence
from headrace.engine.speculation import Drafting
from headrace.logit_ops import LogitOp, Ticket


class Member(NamedTuple):
    """A sequence that draws."""

    seq: Sequence
    item: ScheduledSequence
    drawing: Drawing


@dataclass(slots=True, eq=False)
class StepDraws:
    """What a step asks of its logits, and for whom."""

    ops: list[LogitOp] = field(default_factory=list)
    first_score: dict[ScheduledSequence, int] = field(default_factory=dict)
    """Index of the first op that scores a prompt."""
    groups: dict[Acceptor, list[Member]] = field(default_factory=dict)
    """The sequences that draw, by acceptor; their ops are adjacent, in this order, behind those that score prompts."""
    seqs: list[Sequence] = field(default_factory=list)
    """All sequences of the step, with those that are forked off in it."""

    @property
    def needs_logits(self) -> bool:
        """Whether an acceptor reads the logits themselves."""
        return any(acceptor.needs_logits for acceptor in self.groups)


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that has been launched and not yet finished."""

    scheduled: list[ScheduledSequence]
    drafting: Drafting | None
    """What there is to learn about speculation; None: it rests."""
    draws: StepDraws
    tickets: list[Ticket]
    """One for each launch; several in multi-step decoding."""
    num_rows: int
    """Rows of each launch."""
    launched: float
    """Clock, in seconds, when its drafts were there."""
