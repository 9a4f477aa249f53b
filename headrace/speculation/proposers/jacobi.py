"""Jacobi decoding: the draft is the likeliest tokens of the last draft's rows (Santilli et al.
2023).
"""

from weakref import WeakKeyDictionary

from headrace.batch import Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView


class JacobiProposer:
    """Drafts by Jacobi iteration, with one argmax for each draft row."""

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
        assert result.logits is not None, "the traits request logits"
        for commit in commits:
            if commit.draft.tokens:
                # The rows of the accepted path gave the new tokens. The next row is the row of the
                # first wrong draft token.
                first_node = commit.row + 1
                wrong = first_node + len(commit.path)
                end = first_node + len(commit.draft.tokens)
                likeliest = result.logits[wrong:end].argmax(axis=1).tolist()
                self._chains[seqs[commit.source]] = likeliest

    def _draft(self, seq: SequenceView, budget: int) -> DraftTree:
        # The iteration may start from any tokens. Tokens of the sequence are likely to occur again.
        chain = [*self._chains.pop(seq, ()), *seq.known[:budget]][:budget]
        return DraftTree(chain, list(range(-1, len(chain) - 1)))
