"""A table of what followed what in the outputs of requests that it drafted for: it learns while the engine serves.

Where requests are alike, and answers repeat across them, it drafts what no single prompt holds. What one request taught it is for
those of the same cache salt only: how fast an answer comes hints at what others were answered, as with any cache that is shared.
"""

from collections import deque
from collections.abc import Hashable
from weakref import WeakKeyDictionary, finalize

from headrace.batch import NO_DRAFT, Commit, DraftTree, SequenceView, StepRows
from headrace.propose.trees import merge

_SIZES = (8, 4, 2)
"""Lengths of the runs that are looked up, longest first."""
_FOLLOWERS = 2
"""Different tokens kept after a run, the latest first."""


class OnlineProposer:
    """Drafts that outputs repeat each other. At most `max_runs` runs, the least recently used go first."""

    bounded = True

    def __init__(self, max_nodes: int = 16, max_runs: int = 1 << 16) -> None:
        self.max_nodes = max_nodes
        self._max_runs = max_runs
        self._followers: dict[tuple[Hashable, ...], list[int]] = {}  # in the order of last use
        self._lines: WeakKeyDictionary[SequenceView, _Line] = WeakKeyDictionary()
        self._ended = deque[_Line]()

    def propose(self, seqs: list[SequenceView], budget: list[int]) -> list[DraftTree]:
        # Learning waits until there is something to ask: many tokens at once take far less time than one by one between steps.
        while self._ended:
            self._learn(self._ended.popleft())
        return [self._draft(self._follow(seq), nodes) for seq, nodes in zip(seqs, budget, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], rows: StepRows) -> None:
        pass  # it reads what is known when it is asked, or when a sequence has ended

    def _follow(self, seq: SequenceView) -> "_Line":
        """What there is of a sequence, all of it learned."""
        line = self._lines.get(seq)
        if line is None:
            line = self._lines[seq] = _Line(seq)
            finalize(seq, self._ended.append, line).atexit = False
        self._learn(line)
        return line

    def _draft(self, line: "_Line", budget: int) -> DraftTree:
        tail = line.known[-_SIZES[0] :]
        found = self._look_up(line.scope, tail)
        if found is None:
            return NO_DRAFT
        size, followers = found
        chains = [[token, *self._walk(line.scope, [*tail, token], budget - 1)] for token in followers]
        return merge(chains, budget, confidence=_SIZES[::-1].index(size))

    def _walk(self, scope: Hashable, tokens: list[int], length: int) -> list[int]:
        """The likeliest way on, as far as it is known."""
        chain: list[int] = []
        while len(chain) < length and (found := self._look_up(scope, tokens)):
            chain.append(found[1][0])
            tokens = [*tokens[-_SIZES[0] + 1 :], chain[-1]]
        return chain

    def _look_up(self, scope: Hashable, tokens: list[int]) -> tuple[int, list[int]] | None:
        """The longest run that ends these tokens and is known: its length, and what followed."""
        for size in _SIZES:
            run = (scope, *tokens[-size:])
            if len(run) == 1 + size and (followers := self._followers.get(run)):
                self._followers[run] = self._followers.pop(run)
                return size, followers
        return None

    def _learn(self, line: "_Line") -> None:
        known, table = line.known, self._followers
        for position in range(line.learned, len(known)):
            token = known[position]
            for size in _SIZES:
                if size <= position:
                    run = (line.scope, *known[position - size : position])
                    followers = table.pop(run, None)
                    if followers is None:
                        followers = [token]
                    elif followers[0] != token:
                        followers = [token, *(other for other in followers if other != token)][:_FOLLOWERS]
                    table[run] = followers
        line.learned = len(known)
        while len(table) > self._max_runs:
            del table[next(iter(table))]


class _Line:
    """What there is to learn from a sequence; lives on when the sequence has ended."""

    def __init__(self, seq: SequenceView) -> None:
        self.scope = seq.scope
        self.known = seq.known
        """The sequence's own list, which grows."""
        self.learned = seq.prompt_len
        """Tokens that the table has: only outputs teach it."""
