"""Records of a scheduled step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.batch import NO_DRAFT, DraftTree
from headrace.constraint import Masks
from headrace.engine.output import Output
from headrace.engine.sequence import Sequence
from headrace.kv.manager import BlockCopy
from headrace.logit_ops import SamplerState
from headrace.outputs import DraftStats


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """The part of one sequence in a step."""

    seq: Sequence
    num_scheduled: int
    """Tokens that the step computes. Their slots are reserved."""
    can_sample: bool
    """Whether the step reaches the end of the sequence, unless it is an embedded prompt."""
    source: int = 0
    """Index in the step. A fork has the index of its source."""
    end: int = 0
    """Tokens with KV after the step."""

    draft_budget: int = 0
    draft: DraftTree = NO_DRAFT
    forced: list[int] = field(default_factory=list)
    """Draft tokens that the grammar forces."""
    num_launches: int = 1
    """More than 1 in multi-step decoding."""
    has_spare_slots: bool = False
    """Whether slots beyond the scheduled tokens are reserved; the end of the step frees unused
    ones.
    """

    rows: range = range(0)
    """Rows of the scheduled tokens in the step."""
    scored: range = range(0)
    """Positions whose rows give prompt log-probabilities."""
    first_score_row: int = 0
    first_score_op: int | None = None
    first_sample_row: int = 0
    pooled: range = range(0)
    first_pooled_row: int = 0
    pool_op: int | None = None

    @property
    def position(self) -> int:
        seq = self.seq
        return len(seq.known) + seq.num_pending

    @property
    def sampler(self) -> SamplerState:
        return self.seq.sampler

    @property
    def num_logprobs(self) -> int:
        return self.seq.num_logprobs

    @property
    def masks(self) -> Masks | None:
        """Allowed tokens of each row to sample from, [1 + nodes, words]; None: all."""
        constraint = self.seq.output.constraint
        return None if constraint is None else constraint.masks(self.draft)

    @property
    def output(self) -> Output:
        return self.seq.output

    @property
    def forks(self) -> bool:
        seq = self.seq
        return bool(seq.siblings) and self.num_scheduled == seq.num_until_sample

    @property
    def is_plain(self) -> bool:
        """Whether the sequence has one row, and the next launch needs no host work."""
        seq = self.seq
        return (
            self.num_scheduled == 1
            and self.can_sample
            and not self.draft_budget
            and not seq.may_fork
            and not seq.has_changing_mask
            and seq.output.finish_reason is None
        )

    @property
    def max_useful_draft(self) -> int:
        """Max draft nodes: 0 for padding, and before a fork, whose sequences sample different
        tokens.
        """
        if not self.can_sample or self.seq.may_fork or self.seq.output.finish_reason:
            return 0
        return self.seq.request.limit - len(self.seq.known) - 1

    @property
    def draft_stats(self) -> dict[str, DraftStats]:
        return self.seq.request.drafts

    def give_back_draft_budget(self) -> None:
        """Drop the draft, and free its slots for further launches."""
        self.draft_budget = 0
        self.has_spare_slots = True


@dataclass
class RowBudget:
    """The part of a step that is still free."""

    rows: int
    chunk_work: float
    """Rows left for prompts, in work at the start of a context."""
    logit_rows: int
    """Logit rows left beyond the first of every sequence."""
    attention_crossover: float
    """Context length at which a row costs twice as much as at the start."""

    @property
    def prompt_rows(self) -> int:
        """Rows left for prompts at the start of a context."""
        return int(min(self.rows, self.chunk_work))

    @contextmanager
    def keeping(self, num_rows: int) -> Iterator[None]:
        """Keep rows from the prompt that takes rows in this context; it can have at least one."""
        kept = max(0, min(num_rows, self.prompt_rows - 1))
        self.rows -= kept
        self.chunk_work -= kept
        yield
        self.rows += kept
        self.chunk_work += kept

    def take(self, seq: Sequence, max_rows: int) -> int:
        """Take up to `max_rows` rows of a sequence, and return their number."""
        row_cost = 1 + seq.computed / self.attention_crossover
        affordable = max(1, int(self.chunk_work / row_cost)) if self.chunk_work > 0 else 0
        rows = min(max_rows, self.rows, affordable)

        # Rows with prompt log-probabilities have a budget of their own.
        scored = seq.prompt_rows(rows)
        if len(scored) > self.logit_rows:
            rows = scored.start - seq.computed + self.logit_rows
            scored = scored[: self.logit_rows]

        self.rows -= rows
        self.chunk_work -= rows * row_cost
        self.logit_rows -= len(scored)
        return rows


class SchedulerOutput(NamedTuple):
    scheduled: list[ScheduledSequence]
    copies: list[BlockCopy]
    """Made before the step."""
    rest: RowBudget
