"""A proposer whose draft tokens are accepted with a fixed probability."""

from headrace.batch import Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView
from headrace.simulator.executable import TOKEN


class ChainDrafts:
    """Drafts chains of `depth` tokens, without a cost. `TimedExecutable` accepts them."""

    def __init__(self, depth: int, acceptance: float) -> None:
        self.traits = ProposerTraits(
            max_nodes=depth, in_engine_thread=True, time_limit=None, acceptance=(acceptance,)
        )

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        lengths = [min(budget, self.traits.max_nodes) for budget in budgets]
        return [DraftTree([TOKEN] * length, list(range(-1, length - 1))) for length in lengths]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        """Ignored."""
