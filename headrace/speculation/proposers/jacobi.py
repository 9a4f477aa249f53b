"""Jacobi decoding: drafts are the model's own likeliest tokens in the rows of the last, partly
wrong draft (Santilli et al. 2023).

All rows of a chain are computed at once, each from the draft token before it. Their likeliest
tokens are the chain of the next step, and converge from left to right to what plain decoding gives.
"""

from weakref import WeakKeyDictionary

from headrace.batch import Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView


class JacobiProposer:
    """Drafts by Jacobi iteration; takes one argmax over the logits of each draft row."""

    def __init__(self, max_nodes: int) -> None:
        self.traits = ProposerTraits(
            max_nodes,
            in_engine_thread=True,
            time_limit=None,
            learns_from_rows=True,
            needs_logits=True,
        )
        self._chains: WeakKeyDictionary[SequenceView, list[int]] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        return [self._draft(seq, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        assert result.logits is not None, "the traits ask for them"
        for commit in commits:
            if commit.draft.tokens:
                # The rows up to the accepted path gave the new tokens. The next row is that of the
                # first wrong draft token.
                first, end = (
                    commit.row + 1 + len(commit.path),
                    commit.row + 1 + len(commit.draft.tokens),
                )
                self._chains[seqs[commit.source]] = result.logits[first:end].argmax(axis=1).tolist()

    def _draft(self, seq: SequenceView, budget: int) -> DraftTree:
        # The iteration may start from any tokens; those of the sequence are likelier than others to
        # occur in it again.
        chain = [*self._chains.pop(seq, ()), *seq.known[:budget]][:budget]
        return DraftTree(chain, list(range(-1, len(chain) - 1)))
