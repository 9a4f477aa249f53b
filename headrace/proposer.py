"""The protocol of proposers, which draft tokens, and the part of a sequence that they see."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.batch import Commit, DraftTree
from headrace.constraint import Constraint
from headrace.logit_ops import SamplerState, StepResult

Pays = Callable[[int, Sequence[int]], bool]
"""Whether drafts below a node should pay for their time, by the index of the sequence in the call
and the confidence classes on the path from the root to the node.
"""


def always_pays(index: int, confidences: Sequence[int]) -> bool:
    return True


class SequenceView(Protocol):
    """The part of a sequence that proposers see. They must not change it."""

    @property
    def seq_id(self) -> tuple[int, int]:
        """Number of the request, and index in the request; the index of a beam is its rank."""

    @property
    def known(self) -> list[int]: ...  # prompt and output

    @property
    def prompt_len(self) -> int: ...
    @property
    def computed(self) -> int: ...  # number of known tokens with KV

    @property
    def tables(self) -> Any:
        """The blocks of the sequence in each KV group, with the blocks reserved for drafts."""

    @property
    def scope(self) -> Hashable:
        """Drafts must not come from tokens of sequences with another scope."""

    @property
    def constraint(self) -> Constraint | None:
        """The tokens that may follow; None: all."""

    @property
    def sampler(self) -> SamplerState:
        """The sampler of the sequence. Proposers sample with a clone, which has the same noise."""

    @property
    def is_greedy(self) -> bool: ...  # whether it takes the likeliest token


class ProposerTraits(NamedTuple):
    """Properties of a proposer that the engine knows before it calls it."""

    max_nodes: int
    """Max draft nodes for a sequence in a step."""
    width: int = 0
    """Nodes per depth, if each depth takes the proposer time; 0: deeper drafts take no longer."""
    in_engine_thread: bool = False
    """Whether it runs in the engine's thread, where it may use executables, or in its own."""
    time_limit: float | None = 1.0
    """Seconds after which a call fails and the proposer is retired; None: no limit, for a proposer
    that is known to be quick.
    """
    learns_from_rows: bool = False
    """Whether it learns from its draft rows. Such a proposer gets some rows now and then even if
    they are not expected to pay.
    """
    acceptance: tuple[float, ...] = (0.5,)
    """Assumed share of drafts whose first token is right, by confidence, before any is measured.
    The last share also holds for higher confidences.
    """
    needs_logits: bool = False
    needs_hidden: bool = False
    needs_taps: bool = False
    """Whether it reads the taps of rows. Such a proposer observes the sequences that it is to draft
    for, from their prompts on, and no others.
    """
    observes: bool = True
    """Whether it learns from steps. `observe` is not called otherwise."""


class Proposer(Protocol):
    """Proposes draft tokens. A wrong draft costs time and never changes a token."""

    traits: ProposerTraits

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        """A tree of at most `budgets[i]` nodes below the last known token of each sequence."""

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        """Learn from a finished step, with or without drafts of this proposer.

        `seqs[commit.source]` already has the new tokens.
        """


class DepthProposer(Proposer, Protocol):
    """A proposer whose traits have a width: each depth of a draft takes it time."""

    def propose(
        self, seqs: list[SequenceView], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        """As `Proposer.propose`. A draft ends early if no deeper node pays."""
