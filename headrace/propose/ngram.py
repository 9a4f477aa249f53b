"""Prompt lookup: what followed the last few tokens when they came before, in the prompt or the output (Saxena 2023)."""

from weakref import WeakKeyDictionary

from headrace.batch import BranchView, Commit, Guess, StepRows

_SIZES = (4, 3, 2)
"""Lengths of the matched run, longest first."""
_CANDIDATES = 3
"""Most earlier places to take a continuation from."""


class Ngram:
    """Guesses that the text repeats itself."""

    max_nodes = 8

    def __init__(self) -> None:
        # An entry goes when its branch does, whichever way that ends.
        self._indices: WeakKeyDictionary[BranchView, _Index] = WeakKeyDictionary()

    def propose(self, branches: list[BranchView], room: list[int]) -> list[Guess]:
        return [self._guess(branch, nodes) for branch, nodes in zip(branches, room, strict=True)]

    def observe(self, branches: list[BranchView], commits: list[Commit], rows: StepRows) -> None:
        pass

    def _guess(self, branch: BranchView, room: int) -> Guess:
        index = self._indices.setdefault(branch, _Index())
        index.extend(branch.known)
        return merge([_continuation(branch.known, start, room) for start in index.matches(branch.known)], room)


class _Index:
    """Where each run of tokens was followed by something."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], list[int]] = {}  # run -> positions after it, ascending
        self._length = 0

    def extend(self, known: list[int]) -> None:
        for position in range(self._length, len(known)):
            for size in _SIZES:
                if size <= position:
                    self._next.setdefault(tuple(known[position - size : position]), []).append(position)
        self._length = len(known)

    def matches(self, known: list[int]) -> list[int]:
        """Positions after the longest run that ends the sequence and came before; the latest first."""
        for size in _SIZES:
            if found := self._next.get(tuple(known[-size:])):
                return found[: -_CANDIDATES - 1 : -1]
        return []


def _continuation(known: list[int], start: int, length: int) -> list[int]:
    """What follows `start`, as if the text from there on repeated for ever."""
    period = len(known) - start
    return [known[start + i % period] for i in range(length)]


def merge(chains: list[list[int]], room: int) -> Guess:
    """The chains as one tree. It is filled level by level: chains that agree go deep, chains that differ share the room."""
    guess = Guess([], [])
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    ends = [-1] * len(chains)
    for tokens in zip(*chains, strict=True):
        for i, token in enumerate(tokens):
            step = (ends[i], token)
            if step not in nodes:
                if len(guess.tokens) == room:
                    return guess
                nodes[step] = len(guess.tokens)
                guess.tokens.append(token)
                guess.parents.append(ends[i])
            ends[i] = nodes[step]
    return guess
