"""The policy of speculation: which proposers to call, and how many draft nodes to run.

The manager (`manager.py`) calls a policy in this order in each step:

1. Before slots are reserved for drafts: `begin_step`, then `should_call` and `max_nodes` for each
   proposer and sequence.
2. After each proposer has returned its drafts: `evaluate` and `better`. Then `should_call` decides
   whether the next proposer is still worth a call, given the best draft so far as its rival.
3. After all proposers have returned: `choose_nodes`.
4. After the step: `record_step`, `record_acceptance` and `record_call`.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

from headrace.batch import DraftTree
from headrace.proposer import SequenceView
from headrace.speculation.step_cost import StepCost

Key = TypeVar("Key")


class DraftCandidate(NamedTuple):
    method: str  # name of the proposer
    draft: DraftTree
    values: list[float]  # probability of each node that it is accepted; empty with FixedPolicy


class DraftPolicy(Protocol):
    """Decides how much is drafted. A policy decides by speed alone and never changes a token."""

    @property
    def pause_seconds(self) -> float:
        """Seconds of plain decoding until proposers may be called again; 0: now."""

    def begin_step(self, cost: StepCost, num_scheduled: int, num_sampling: int) -> None:
        """Begin a step that may have drafts.

        The step has `num_scheduled` rows without drafts, and `num_sampling` sequences sample.
        `cost` estimates the seconds of steps with about as many sequences.
        """

    def should_call(
        self, name: str, seq: SequenceView, rival: DraftCandidate | None = None
    ) -> bool:
        """Whether to call a proposer for a sequence that already has the draft `rival`, or none."""

    def max_nodes(self, name: str, seq: SequenceView, limit: int) -> int: ...

    def evaluate(self, name: str, seq: SequenceView, draft: DraftTree) -> DraftCandidate:
        """Make a candidate of a draft that a proposer has returned, even if it has no nodes."""

    def better(self, first: DraftCandidate, second: DraftCandidate) -> DraftCandidate:
        """The better candidate for a sequence; the first of equals."""

    def choose_nodes(self, candidates: Mapping[Key, DraftCandidate]) -> dict[Key, list[int]]:
        """The nodes to run of each candidate, ascending. The parent of a chosen node is chosen."""

    def record_step(self, seconds: float) -> None: ...

    def record_acceptance(
        self, seq: SequenceView, candidate: DraftCandidate, tokens: list[int]
    ) -> None:
        """Record which nodes of a candidate were right: `tokens` are the sequence's new tokens."""

    def record_call(self, name: str, nodes: Mapping[SequenceView, int], seconds: float) -> None:
        """Record the seconds that a proposer took to propose and to observe the step.

        `nodes` has the number of nodes that were requested for each sequence.
        """


class FixedPolicy:
    """Calls every proposer in every step and runs the largest draft of each sequence."""

    pause_seconds = 0.0

    def begin_step(self, cost: StepCost, num_scheduled: int, num_sampling: int) -> None:
        pass

    def should_call(
        self, name: str, seq: SequenceView, rival: DraftCandidate | None = None
    ) -> bool:
        return True

    def max_nodes(self, name: str, seq: SequenceView, limit: int) -> int:
        return limit

    def evaluate(self, name: str, seq: SequenceView, draft: DraftTree) -> DraftCandidate:
        return DraftCandidate(name, draft, [])

    def better(self, first: DraftCandidate, second: DraftCandidate) -> DraftCandidate:
        return second if len(second.draft.tokens) > len(first.draft.tokens) else first

    def choose_nodes(self, candidates: Mapping[Key, DraftCandidate]) -> dict[Key, list[int]]:
        return {
            key: list(range(len(candidate.draft.tokens))) for key, candidate in candidates.items()
        }

    def record_step(self, seconds: float) -> None:
        pass

    def record_acceptance(
        self, seq: SequenceView, candidate: DraftCandidate, tokens: list[int]
    ) -> None:
        pass

    def record_call(self, name: str, nodes: Mapping[SequenceView, int], seconds: float) -> None:
        pass
