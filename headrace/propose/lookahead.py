"""Lookahead decoding (Fu et al. 2024): a window of Jacobi iterations that collects n-grams, and n-grams that are verified.

A column of the window is a run of drafts, one from each of the last iterations; the likeliest token after it makes it an
n-gram, which goes into a pool under its first token. N-grams that begin with the last known token are drafts worth a row.
The window's mask is that of a tree: its first level is a chain below the last scheduled row, and the rest of a column is a chain
below its node of that level. So both share one draft tree, and a node of the window may be accepted too.
"""

from collections import OrderedDict
from weakref import WeakKeyDictionary

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.propose.trees import Tree
from headrace.proposer import ProposerTraits, SequenceView

_LEVELS = 2
"""Of the window; an n-gram is one longer."""
_WINDOW = 5
"""Most columns."""
_NGRAMS = 3
"""Kept under a first token, the latest first."""
_POOL = 2048
"""First tokens in the pool of a sequence; the least recently used go first."""


class LookaheadProposer:
    """Drafts by iteration, and remembers what came up."""

    def __init__(self, max_nodes: int = 16) -> None:
        self.traits = ProposerTraits(max_nodes, in_engine_thread=True, time_limit=None, learns_from_rows=True, needs_logits=True)
        self._searches: WeakKeyDictionary[SequenceView, _Search] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        return [self._draft(seq, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        for commit in commits:
            search = self._searches.get(seqs[commit.source])
            if search and commit.tokens:
                search.observe(commit, result)

    def _draft(self, seq: SequenceView, budget: int) -> DraftTree:
        if budget < _LEVELS:
            return NO_DRAFT
        search = self._searches.get(seq)
        if search is None:
            search = self._searches[seq] = _Search(seq.known)
        return search.draft(seq.known, budget)


class _Search:
    """Window and pool of a sequence."""

    def __init__(self, known: list[int]) -> None:
        # Any tokens do to begin with; those of the text itself are at least of its kind.
        self._fill = (known * (_WINDOW * _LEVELS))[: _WINDOW * _LEVELS]
        self._levels = [self._fill[level::_LEVELS] for level in range(_LEVELS)]  # [levels][columns]
        self._pool: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        self._columns: list[list[int]] = []
        """Nodes of each column that was in the last draft."""

    def draft(self, known: list[int], budget: int) -> DraftTree:
        tree = Tree(budget)
        self._columns = []
        stem = -1
        for column in zip(*self._levels, strict=True):
            if len(tree.tokens) + _LEVELS > budget - _LEVELS * bool(self._columns):  # leave room for an n-gram
                break
            nodes = tree.add_chain(column, stem)
            self._columns.append(nodes)
            stem = nodes[0]
        for ngram in self._pool.get(known[-1], ()):
            tree.add_chain(ngram)
        return DraftTree(tree.tokens, tree.parents, indivisible=True)

    def observe(self, commit: Commit, result: StepResult) -> None:
        """Turn columns into n-grams, and move the window on by the new tokens."""
        columns, self._columns = self._columns, []
        if commit.draft.tokens:
            assert result.logits is not None, "the traits ask for them"
            tokens = commit.draft.tokens
            ends = [commit.row + 1 + nodes[-1] for nodes in columns]
            newest = [int(result.logits[end].argmax()) for end in ends]
            for nodes, last in zip(columns, newest, strict=True):
                first, *rest = (tokens[node] for node in nodes)
                self._remember(first, (*rest, last))
            older = [[tokens[nodes[level]] for nodes in columns] for level in range(1, _LEVELS)]
            self._levels = [*older, newest]
        skipped = len(commit.tokens) - 1
        self._levels = [(level[skipped:] + self._fill)[:_WINDOW] for level in self._levels]

    def _remember(self, first: int, rest: tuple[int, ...]) -> None:
        others = [ngram for ngram in self._pool.pop(first, ()) if ngram != rest]
        self._pool[first] = [rest, *others[: _NGRAMS - 1]]
        if len(self._pool) > _POOL:
            self._pool.popitem(last=False)
