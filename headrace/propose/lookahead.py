"""Lookahead decoding (Fu et al. 2024): a window of Jacobi iterations that collects n-grams, and n-grams that are verified.

A column of the window is a run of guesses, one from each of the last iterations; the likeliest token after it makes it an
n-gram, which goes into a pool under its first token. N-grams that begin with the last known token are guesses worth a row.
The window's mask is that of a tree: its first level is a chain below the last forced row, and the rest of a column is a chain
below its node of that level. So both share one guess tree, and a node of the window may be accepted too.
"""

from collections import OrderedDict
from weakref import WeakKeyDictionary

from headrace.batch import NO_GUESS, BranchView, Commit, Guess, StepRows
from headrace.propose.trees import Tree

_LEVELS = 2
"""Of the window; an n-gram is one longer."""
_WINDOW = 5
"""Most columns."""
_NGRAMS = 3
"""Kept under a first token, the latest first."""
_POOL = 2048
"""First tokens in the pool of a branch; the least recently used go first."""


class Lookahead:
    """Guesses by iteration, and remembers what came up."""

    bounded = True
    needs_rows = True

    def __init__(self, max_nodes: int = 16) -> None:
        self.max_nodes = max_nodes
        self._searches: WeakKeyDictionary[BranchView, _Search] = WeakKeyDictionary()

    def propose(self, branches: list[BranchView], room: list[int]) -> list[Guess]:
        return [self._guess(branch, nodes) for branch, nodes in zip(branches, room, strict=True)]

    def observe(self, branches: list[BranchView], commits: list[Commit], rows: StepRows) -> None:
        for commit in commits:
            search = self._searches.get(branches[commit.source])
            if search and commit.tokens:
                search.observe(commit, rows)

    def _guess(self, branch: BranchView, room: int) -> Guess:
        if room < _LEVELS:
            return NO_GUESS
        search = self._searches.get(branch)
        if search is None:
            search = self._searches[branch] = _Search(branch.known)
        return search.guess(branch.known, room)


class _Search:
    """Window and pool of a branch."""

    def __init__(self, known: list[int]) -> None:
        # Any tokens do to begin with; those of the text itself are at least of its kind.
        self._fill = (known * (_WINDOW * _LEVELS))[: _WINDOW * _LEVELS]
        self._levels = [self._fill[level::_LEVELS] for level in range(_LEVELS)]  # [levels][columns]
        self._pool: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        self._columns: list[list[int]] = []
        """Nodes of each column that was in the last guess."""

    def guess(self, known: list[int], room: int) -> Guess:
        tree = Tree(room)
        self._columns = []
        stem = -1
        for column in zip(*self._levels, strict=True):
            if len(tree.tokens) + _LEVELS > room - _LEVELS * bool(self._columns):  # leave room for an n-gram
                break
            nodes = tree.add_chain(column, stem)
            self._columns.append(nodes)
            stem = nodes[0]
        for ngram in self._pool.get(known[-1], ()):
            tree.add_chain(ngram)
        return Guess(tree.tokens, tree.parents, whole=True)

    def observe(self, commit: Commit, rows: StepRows) -> None:
        """Turn columns into n-grams, and move the window on by the new tokens."""
        columns, self._columns = self._columns, []
        if commit.guess.tokens:
            tokens = commit.guess.tokens
            ends = [commit.row + 1 + nodes[-1] for nodes in columns]
            newest = [int(rows.logits[end].argmax()) for end in ends]
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
