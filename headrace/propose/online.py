"""A table of what followed what in the outputs of all requests: it learns while the engine serves.

Where requests are alike, and answers repeat across them, it guesses what no single prompt holds. It is shared by all requests
of an engine: how fast an answer comes then hints at what others were answered, as with any cache that requests share.
"""

from headrace.batch import NO_GUESS, BranchView, Commit, Guess, StepRows
from headrace.propose.trees import merge

_SIZES = (8, 4, 2)
"""Lengths of the runs that are looked up, longest first."""
_FOLLOWERS = 2
"""Different tokens kept after a run, the latest first."""


class Online:
    """Guesses that outputs repeat each other. At most `max_runs` runs, the least recently used go first."""

    bounded = True

    def __init__(self, max_nodes: int = 16, max_runs: int = 1 << 16) -> None:
        self.max_nodes = max_nodes
        self._max_runs = max_runs
        self._followers: dict[tuple[int, ...], list[int]] = {}  # in the order of last use

    def propose(self, branches: list[BranchView], room: list[int]) -> list[Guess]:
        return [self._guess(branch.known, nodes) for branch, nodes in zip(branches, room, strict=True)]

    def observe(self, branches: list[BranchView], commits: list[Commit], rows: StepRows) -> None:
        for commit in commits:
            if commit.tokens:
                # Forks of a branch have one token each, in the place of the one that `known` has.
                known = branches[commit.source].known
                before = known[max(0, len(known) - len(commit.tokens) - _SIZES[0]) : len(known) - len(commit.tokens)]
                self._learn(before, commit.tokens)

    def _guess(self, known: list[int], room: int) -> Guess:
        tail = known[-_SIZES[0] :]
        found = self._look_up(tail)
        if found is None:
            return NO_GUESS
        size, followers = found
        chains = [[token, *self._walk([*tail, token], room - 1)] for token in followers]
        return merge(chains, room, confidence=_SIZES[::-1].index(size))

    def _walk(self, tokens: list[int], length: int) -> list[int]:
        """The likeliest way on, as far as it is known."""
        chain: list[int] = []
        while len(chain) < length and (found := self._look_up(tokens)):
            chain.append(found[1][0])
            tokens = [*tokens[-_SIZES[0] + 1 :], chain[-1]]
        return chain

    def _look_up(self, tokens: list[int]) -> tuple[int, list[int]] | None:
        """The longest run that ends these tokens and is known: its length, and what followed."""
        for size in _SIZES:
            run = tuple(tokens[-size:])
            if len(run) == size and (followers := self._followers.get(run)):
                self._followers[run] = self._followers.pop(run)
                return size, followers
        return None

    def _learn(self, before: list[int], tokens: list[int]) -> None:
        line = before + tokens
        for position in range(len(before), len(line)):
            token = line[position]
            for size in _SIZES:
                if size <= position:
                    run = tuple(line[position - size : position])
                    followers = self._followers.pop(run, None)
                    if followers is None:
                        followers = [token]
                    elif followers[0] != token:
                        followers = [token, *(other for other in followers if other != token)][:_FOLLOWERS]
                    self._followers[run] = followers
        while len(self._followers) > self._max_runs:
            del self._followers[next(iter(self._followers))]
