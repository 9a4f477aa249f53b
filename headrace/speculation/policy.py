"""The policy of speculation: which proposers to call, and how many draft nodes to run.

The order of calls: `begin_step`, `should_call`, `max_nodes`, then `pays_below` during, and
`evaluate`, `better` and `should_call` after each proposer, `choose_nodes`, and the `record`
methods.
"""

from collections.abc import Mapping, Sequence
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
    """Decides how much is drafted, by speed alone. A policy never changes a token."""

    @property
    def pause_seconds(self) -> float:
        """Seconds of plain decoding until the next call; 0: now."""

    def begin_step(self, cost: StepCost, num_scheduled: int, num_sampling: int) -> None:
        """Begin a step of `num_scheduled` rows without drafts, in which `num_sampling` sequences
        sample.

        `cost` estimates the seconds of such steps.
        """

    def should_call(
        self, name: str, seq: SequenceView, rival: DraftCandidate | None = None
    ) -> bool:
        """Whether to call a proposer, given the best draft so far as `rival`."""

    def max_nodes(self, name: str, seq: SequenceView, limit: int) -> int: ...

    def pays_below(self, name: str, seq: SequenceView, confidences: Sequence[int]) -> bool:
        """Whether one more depth pays below a node, by the classes on the path to the node."""

    def evaluate(self, name: str, seq: SequenceView, draft: DraftTree) -> DraftCandidate:
        """Make a candidate of a proposer's draft, even if it has no nodes."""

    def better(self, first: DraftCandidate, second: DraftCandidate) -> DraftCandidate:
        """Return the better candidate for a sequence; the first of equals."""

    def choose_nodes(self, candidates: Mapping[Key, DraftCandidate]) -> dict[Key, list[int]]:
        """Return the nodes to run of each candidate, ascending and with their parents."""

    def follows(self, name: str, seq: SequenceView) -> bool:
        """Whether a proposer that reads rows keeps those of a sequence in this step."""

    def gain(self, candidate: DraftCandidate) -> float:
        """Tokens that a draft should gain, less the price of its rows."""

    def record_step(self, seconds: float, num_seqs: int) -> None:
        """Record the seconds of a step of `num_seqs` sequences."""

    def record_savings(self, name: str, seconds: float) -> None:
        """Record the seconds that drafts saved in a step, less those of their rows."""

    def record_observation(self, name: str, seconds: float) -> None:
        """Record the seconds that a proposer observed a step, without a call."""

    def record_acceptance(
        self, seq: SequenceView, candidate: DraftCandidate, tokens: list[int]
    ) -> None:
        """Record which nodes were right, by the sequence's new tokens."""

    def record_call(self, name: str, nodes: Mapping[SequenceView, int], seconds: float) -> None:
        """Record the seconds of a proposer in the step, with the drafted nodes by sequence."""

    def forget(self, name: str) -> None:
        """Forget the acceptance of a proposer, which has other weights now."""


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

    def pays_below(self, name: str, seq: SequenceView, confidences: Sequence[int]) -> bool:
        return True

    def evaluate(self, name: str, seq: SequenceView, draft: DraftTree) -> DraftCandidate:
        return DraftCandidate(name, draft, [])

    def better(self, first: DraftCandidate, second: DraftCandidate) -> DraftCandidate:
        return second if len(second.draft.tokens) > len(first.draft.tokens) else first

    def choose_nodes(self, candidates: Mapping[Key, DraftCandidate]) -> dict[Key, list[int]]:
        return {
            key: list(range(len(candidate.draft.tokens))) for key, candidate in candidates.items()
        }

    def follows(self, name: str, seq: SequenceView) -> bool:
        return True

    def gain(self, candidate: DraftCandidate) -> float:
        return 0.0

    def record_step(self, seconds: float, num_seqs: int) -> None:
        pass

    def record_savings(self, name: str, seconds: float) -> None:
        pass

    def record_observation(self, name: str, seconds: float) -> None:
        pass

    def record_acceptance(
        self, seq: SequenceView, candidate: DraftCandidate, tokens: list[int]
    ) -> None:
        pass

    def record_call(self, name: str, nodes: Mapping[SequenceView, int], seconds: float) -> None:
        pass

    def forget(self, name: str) -> None:
        pass
