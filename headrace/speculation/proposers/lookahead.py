"""Lookahead decoding: a window of Jacobi iterations collects n-grams (Fu et al. 2024).

A column of the window has a token of each of the last iterations, and becomes an n-gram with the
next token. Window and n-grams share one draft tree: the window's first level is a chain, and each
column hangs below its node.
"""

from collections import OrderedDict
from weakref import WeakKeyDictionary

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView
from headrace.speculation.proposers.trees import Tree

_LEVELS = 2
"""Tokens of a column; an n-gram has one more."""
_MAX_COLUMNS = 5
_MAX_NGRAMS = 3
_MAX_FIRST_TOKENS = 2048
"""First tokens in the pool of a sequence; the least recently used is dropped first."""


class LookaheadProposer:
    def __init__(self, max_nodes: int) -> None:
        self.traits = ProposerTraits(
            max_nodes,
            in_engine_thread=True,
            time_limit=None,
            learns_from_rows=True,
            needs_logits=True,
        )
        self._states: WeakKeyDictionary[SequenceView, _State] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        return [self._draft(seq, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        for commit in commits:
            state = self._states.get(seqs[commit.source])
            if state and commit.tokens:
                state.observe(commit, result)

    def _draft(self, seq: SequenceView, budget: int) -> DraftTree:
        if budget < _LEVELS:
            return NO_DRAFT
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(seq.known)
        return state.draft(seq.known, budget)


class _State:
    def __init__(self, known: list[int]) -> None:
        # The iteration may start from any tokens. Tokens of the sequence are likely to occur again.
        self._fill = (known * (_MAX_COLUMNS * _LEVELS))[: _MAX_COLUMNS * _LEVELS]
        self._levels = [self._fill[level::_LEVELS] for level in range(_LEVELS)]  # [levels][columns]
        self._pool: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        self._columns: list[list[int]] = []

    def draft(self, known: list[int], budget: int) -> DraftTree:
        tree = Tree(budget)
        self._columns = []
        stem = -1
        for column in zip(*self._levels, strict=True):
            # Columns after the first leave the budget of one n-gram.
            reserved = _LEVELS if self._columns else 0
            if len(tree.tokens) + _LEVELS > budget - reserved:
                break
            nodes = tree.add_chain(column, stem)
            self._columns.append(nodes)
            stem = nodes[0]
        for ngram in self._pool.get(known[-1], ()):
            tree.add_chain(ngram)
        return DraftTree(tree.tokens, tree.parents, indivisible=True)

    def observe(self, commit: Commit, result: StepResult) -> None:
        columns, self._columns = self._columns, []
        if commit.draft.tokens:
            assert result.logits is not None, "the traits request logits"
            tokens = commit.draft.tokens
            ends = [commit.row + 1 + nodes[-1] for nodes in columns]
            newest = [int(result.logits[end].argmax()) for end in ends]
            for nodes, last in zip(columns, newest, strict=True):
                first, *rest = (tokens[node] for node in nodes)
                self._remember(first, (*rest, last))
            older = [[tokens[nodes[level]] for nodes in columns] for level in range(1, _LEVELS)]
            self._levels = [*older, newest]
        skipped = len(commit.tokens) - 1
        self._levels = [(level[skipped:] + self._fill)[:_MAX_COLUMNS] for level in self._levels]

    def _remember(self, first: int, rest: tuple[int, ...]) -> None:
        others = [ngram for ngram in self._pool.pop(first, ()) if ngram != rest]
        self._pool[first] = [rest, *others[: _MAX_NGRAMS - 1]]
        if len(self._pool) > _MAX_FIRST_TOKENS:
            self._pool.popitem(last=False)
