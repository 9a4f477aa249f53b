"""The protocol of proposers, which draft tokens, and the part of a sequence that they may see."""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from headrace.batch import Commit, DraftTree
from headrace.constraint import Constraint
from headrace.logit_ops import SamplerState, StepResult


class SequenceView(Protocol):
    """The part of a sequence that a proposer may see."""

    @property
    def seq_id(
        self,
    ) -> tuple[
        int, int
    ]: ...  # (request number, index in the request); the index of a beam is its present rank
    @property
    def known(self) -> list[int]: ...  # all decided tokens, prompt and output; read only
    @property
    def prompt_len(self) -> int: ...
    @property
    def computed(self) -> int: ...  # known tokens with KV
    @property
    def tables(
        self,
    ) -> (
        Any
    ): ...  # in each KV group, the blocks of their KV slots, and of those reserved for drafts
    @property
    def scope(
        self,
    ) -> Hashable: ...  # drafts for a sequence of one scope must not come from tokens of another
    @property
    def constraint(self) -> Constraint | None: ...  # what may follow; None: anything
    @property
    def sampler(
        self,
    ) -> (
        SamplerState
    ): ...  # draft with a clone, which has the same noise and leaves the sequence unchanged


class ProposerTraits(NamedTuple):
    """What the engine must know of a proposer before it calls it."""

    max_nodes: int
    """Most draft nodes for a sequence in a step."""
    width: int = 0
    """Nodes at each depth, for a proposer that takes time for each depth; 0: a deeper draft takes
    no longer.
    """
    in_engine_thread: bool = False
    """Whether it is called in the engine's thread, where it may use executables, rather than in one
    of its own.
    """
    time_limit: float | None = 1.0
    """Seconds after which a call counts as failed and the proposer is retired; None: no limit, for
    one that is known to be quick.
    """
    learns_from_rows: bool = False
    """Whether it learns from its draft rows, so that it needs some now and then even if they are
    not expected to pay.
    """
    acceptance: tuple[float, ...] = (0.5,)
    """Share of drafts whose first token is right, by confidence, as far as is known before any is
    tried; the last is for all above.
    """
    needs_logits: bool = False
    """Whether `observe` reads the logits of the step."""
    needs_hidden: bool = False
    """Whether `observe` reads the hidden rows of the step."""


class Proposer(Protocol):
    """Proposes draft tokens. A wrong draft costs time, and never changes a token."""

    traits: ProposerTraits

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        """A tree of at most `budgets[i]` nodes below the last known token of each sequence."""

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        """Learn from a finished step, which it need not have drafted for; `seqs[commit.source]` has
        the new tokens already.
        """
