"""The records of a step to be: which sequences take part in it, with how many rows, and what it has
left.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.batch import NO_DRAFT, DraftTree
from headrace.engine.sequence import Sequence
from headrace.kv.manager import Copy
from headrace.request import DraftStats


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One sequence's part of a step."""

    seq: Sequence
    num_scheduled: int
    """Known or pending tokens that the step computes: rows whose slots are reserved."""
    can_sample: bool
    """Whether these reach the last known or pending token, so that the next one can be drawn; never
    in a prompt that is embedded.
    """
    draft_budget: int = 0
    """Draft nodes that it may have: slots reserved beyond its scheduled tokens."""
    draft: DraftTree = NO_DRAFT
    certain: list[int] = field(default_factory=list)
    """The tokens of the draft, where they are not proposed but certain."""
    num_launches: int = 1
    """Launches in which it draws a token each: more than one in multi-step decoding."""
    has_spare_slots: bool = False
    """Whether it has slots for further launches; those that are not used are given back."""
    end: int = 0
    """Tokens of the sequence that have KV when the scheduled ones have it."""
    scored: range = range(0)
    """Positions whose rows give prompt log-probabilities."""
    first_score_row: int = 0
    """Index of the first of these rows among the logit rows."""
    first_sample_row: int = 0
    """Index of the first row to draw from among the logit rows."""
    pooled: range = range(0)
    """Positions whose rows are pooled."""
    first_pooled_row: int = 0
    """Index of the first of these rows among the pooled rows."""

    @property
    def forks(self) -> bool:
        """Whether the sequence's siblings go their own ways after these rows."""
        return bool(self.seq.siblings) and self.num_scheduled == self.seq.num_until_sample

    @property
    def is_plain(self) -> bool:
        """Whether it is one row, without a draft, from which one token is drawn, and the next could
        be drawn without a look at it.
        """
        alone = (
            self.num_scheduled == 1
            and self.can_sample
            and not self.draft_budget
            and not self.seq.may_fork
            and not self.seq.has_changing_mask
        )
        return alone and self.seq.output.finish_reason is None

    @property
    def draft_stats(self) -> dict[str, DraftStats]:
        """Statistics of the request's drafts, by proposer."""
        return self.seq.request.drafts

    def give_back_draft_budget(self) -> None:
        """Have no draft: its slots are for launches, or given back when the step is finished."""
        self.draft_budget, self.has_spare_slots = 0, True

    @property
    def max_useful_draft(self) -> int:
        """Draft nodes that are of use: none where the sequence may fork, since its draws go
        different ways, nor for the last token.
        """
        return (
            self.seq.request.limit - len(self.seq.known) - 1
            if self.can_sample and not self.seq.may_fork
            else 0
        )


@dataclass
class RowBudget:
    """What is left of a step."""

    rows: int
    chunk_work: float
    """For prompts and recomputations, in rows at the beginning of a context."""
    logit_rows: int
    """Beyond the one that every sequence may have."""
    attention_crossover: float
    """Context with which a row costs two such rows."""

    def take(self, seq: Sequence, most: int) -> int:
        """As many of the sequence's next `most` rows as there is room for."""
        cost = 1 + seq.computed / self.attention_crossover
        rows = min(
            most, self.rows, max(1, int(self.chunk_work / cost)) if self.chunk_work > 0 else 0
        )
        wanted = seq.prompt_rows(rows)
        if len(wanted) > self.logit_rows:
            rows, wanted = wanted.start - seq.computed + self.logit_rows, wanted[: self.logit_rows]
        self.rows -= rows
        self.chunk_work -= rows * cost
        self.logit_rows -= len(wanted)
        return rows


class SchedulerOutput(NamedTuple):
    """A step to be."""

    scheduled: list[ScheduledSequence]
    copies: list[Copy]
    """To be made before the step."""
    left: RowBudget
    """Rows that the scheduled tokens leave, for drafts."""
