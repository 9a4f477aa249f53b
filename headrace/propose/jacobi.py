"""Jacobi decoding: drafts are what the model itself said in the last step, below drafts that were wrong.

The rows of a chain are all computed at once, each from the draft before it; their likeliest tokens are the chain of the next
step, and settle from left to right into what plain decoding gives (Santilli et al. 2023).
"""

from weakref import WeakKeyDictionary

from headrace.batch import Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView


class JacobiProposer:
    """Drafts by iteration; one look at the logits of each draft row."""

    def __init__(self, max_nodes: int = 16) -> None:
        self.traits = ProposerTraits(max_nodes, in_engine_thread=True, time_limit=None, learns_from_rows=True, needs_logits=True)
        self._chains: WeakKeyDictionary[SequenceView, list[int]] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        return [self._draft(seq, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        assert result.logits is not None, "the traits ask for them"
        for commit in commits:
            if commit.tokens and commit.draft.tokens:
                # The first rows led to the new tokens. The next one is that of the first wrong draft, and says what follows it.
                first, end = commit.row + 1 + len(commit.path), commit.row + 1 + len(commit.draft.tokens)
                self._chains[seqs[commit.source]] = result.logits[first:end].argmax(axis=1).tolist()

    def _draft(self, seq: SequenceView, budget: int) -> DraftTree:
        # Any tokens do to begin with; those of the text itself are at least of its kind.
        chain = [*self._chains.pop(seq, ()), *seq.known[:budget]][:budget]
        return DraftTree(chain, list(range(-1, len(chain) - 1)))
