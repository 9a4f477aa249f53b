"""Prompt lookup: drafts what followed the last few tokens where they occurred before, in prompt or
output (Saxena 2023).
"""

from array import array
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView
from headrace.speculation.proposers.trees import merge

_SIZES = (8, 4, 2)
"""Lengths of the runs that are looked up, longest first."""
_MAX_PLACES = 4
"""Most places kept of each run, the latest ones."""
_MAX_CANDIDATES = 3
"""Most places to take a continuation from."""
_MAX_MATCH = 16
"""Tokens up to which the length of a match is measured."""
_ACCEPTANCE = (0.5, 0.75, 0.85, 0.95)
"""Where matches of 2, 4, 8 and 16 tokens are right before anything is measured, as
`ProposerTraits.acceptance`: a little below what 96 answers of the default model gave, to prompts to
quote, edit, transform and chat (`benchmarks/acceptance.py`: 0.59, 0.82, 0.89, 0.96).
"""
_MAX_RUNS = 1 << 15
"""Most runs of a size that are kept of a sequence; the oldest is dropped first."""


class NgramProposer:
    """Drafts repetitions of a sequence's own text. It takes microseconds for each sequence and each
    new token of it.
    """

    def __init__(self, max_nodes: int) -> None:
        self.traits = ProposerTraits(
            max_nodes, in_engine_thread=True, time_limit=None, acceptance=_ACCEPTANCE
        )
        # An entry is dropped with its sequence, however that ends.
        self._indices: WeakKeyDictionary[SequenceView, _Index] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        return [self._draft(seq, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass  # `propose` reads the new tokens of a sequence

    def _draft(self, seq: SequenceView, budget: int) -> DraftTree:
        index = self._indices.get(seq)
        if index is None:
            index = self._indices[seq] = _Index()
        known = seq.known
        index.extend(known)
        matches = index.matches(known)
        if not matches:
            return NO_DRAFT
        longest = matches[0][0]
        chains = [
            _continuation(known, place, budget) for length, place in matches if 2 * length > longest
        ]
        return merge(
            chains, budget, confidence=longest.bit_length() - 2
        )  # 0, 1, 2, 3 from 2, 4, 8, 16 tokens on


class _Index:
    """The places where each run of tokens was followed by another token: by size of the runs."""

    def __init__(self) -> None:
        self._runs = [_Runs(size) for size in _SIZES]
        self._length = 0

    def extend(self, known: list[int]) -> None:
        """Add the runs before each new token."""
        for runs in self._runs:
            runs.extend(known, self._length)
        self._length = len(known)

    def matches(self, known: list[int]) -> list[tuple[int, int]]:
        """(length, position after it) of earlier occurrences of what ends the sequence: the longest
        first, of equal ones the latest.
        """
        found: dict[int, int] = {}
        for runs in self._runs:
            for place in runs.places(_key(known[-runs.size :])):
                if place not in found:
                    found[place] = _match_length(known, place, runs.size)
            if len(found) >= _MAX_CANDIDATES:
                break
        return sorted(((length, place) for place, length in found.items()), reverse=True)[
            :_MAX_CANDIDATES
        ]


class _Runs:
    """The places behind runs of `size` tokens. Each leads to the one before it, so a long prompt is
    added without a list for each run.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: dict[bytes, int] = {}
        """The latest place behind each run; the run that was met first is the first to be dropped.
        """
        self._before = array("i", [-1]) * size
        """By place: the one before it behind the same run; -1: there is none."""

    def extend(self, known: list[int], length: int) -> None:
        """Add the runs before each token from `length` on."""
        last, before = self._last, self._before
        first = max(length, self.size)
        data, step, width = (
            _key(known[first - self.size : -1]),
            self._before.itemsize,
            self._before.itemsize * self.size,
        )
        for place, start in enumerate(range(0, len(data) - width + 1, step), first):
            run = data[start : start + width]
            before.append(last.get(run, -1))
            last[run] = place
        while len(last) > _MAX_RUNS:
            del last[next(iter(last))]

    def places(self, run: bytes) -> Iterator[int]:
        """The latest places behind a run, the latest first."""
        place = self._last.get(run, -1)
        for _ in range(_MAX_PLACES):
            if place < 0:
                return
            yield place
            place = self._before[place]


def _key(tokens: list[int]) -> bytes:
    """A run, or several that overlap, as bytes: sooner made and found than tuples, and nothing for
    the garbage collector.
    """
    return array("i", tokens).tobytes()


def _match_length(known: list[int], place: int, size: int) -> int:
    """Number of tokens before `place` that are also those at the end of the sequence; at least
    `size`, which is known.
    """
    length, most = size, min(_MAX_MATCH, place)
    while length < most and known[place - length - 1] == known[-length - 1]:
        length += 1
    return length


def _continuation(known: list[int], start: int, length: int) -> list[int]:
    """The `length` tokens from `start` on, as if the text from there on repeated for ever."""
    period = len(known) - start
    return [known[start + i % period] for i in range(length)]
