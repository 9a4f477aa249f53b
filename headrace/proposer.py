"""What a proposer of draft tokens is, and what it may see of a sequence: protocols and records."""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from headrace.batch import Commit, DraftTree
from headrace.logit_ops import SamplerState, StepResult


class SequenceView(Protocol):
    """What a proposer may see of a sequence."""

    @property
    def seq_id(self) -> tuple[int, int]: ...  # (request number, index in the request): that of a beam is its rank of the moment
    @property
    def known(self) -> list[int]: ...  # all decided tokens, prompt and output; not to be changed
    @property
    def prompt_len(self) -> int: ...
    @property
    def computed(self) -> int: ...  # known tokens with KV
    @property
    def tables(self) -> Any: ...  # in each KV group, the blocks of their slots and of those reserved for drafts
    @property
    def scope(self) -> Hashable: ...  # drafts for one scope must not come from what another scope holds
    @property
    def sampler(self) -> SamplerState: ...  # a clone of it draws with the sequence's own noise, and leaves no trace


class ProposerTraits(NamedTuple):
    """All that the engine must know of a proposer before it calls it."""

    max_nodes: int
    """Most draft nodes for a sequence in a step."""
    width: int = 0
    """Nodes at each depth, for a proposer that takes time for each depth; 0: it takes no longer for a deeper draft."""
    in_engine_thread: bool = False
    """Whether it is called in the engine's thread, where it may use executables; otherwise it has a thread of its own."""
    time_limit: float | None = 1.0
    """Seconds that a call may take before the proposer is retired; None: it is known to be quick."""
    learns_from_rows: bool = False
    """Whether it learns from its draft rows, and so must have some now and then that are not expected to pay."""
    needs_logits: bool = False
    """Whether `observe` reads the logits of the step."""
    needs_hidden: bool = False
    """Whether `observe` reads the hidden rows of the step."""


class Proposer(Protocol):
    """Proposes draft tokens. Drafts may be wrong in any way; they never change a token."""

    traits: ProposerTraits

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        """A tree of at most `budgets[i]` nodes below the last known token of each sequence."""

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        """See what became of a step that it was asked for, or the last before; `seqs[commit.source]` has the new tokens."""
