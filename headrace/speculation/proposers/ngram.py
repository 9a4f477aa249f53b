"""Prompt lookup: drafts the tokens after earlier occurrences of the last few (Saxena 2023)."""

from array import array
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView
from headrace.speculation.proposers.trees import merge

_SIZES = (8, 4, 2)
_MAX_PLACES = 4
"""Latest places of each run."""
_MAX_CANDIDATES = 3
_MAX_MATCH = 16
"""Tokens; longer matches count as this long."""
_ACCEPTANCE = (0.5, 0.75, 0.85, 0.95)
"""Rates for matches of 2, 4, 8 and 16 tokens, a little below the measured 0.59, 0.82, 0.89, 0.96
(`benchmarks/acceptance.py`).
"""
_MAX_RUNS = 1 << 15


class NgramProposer:
    """Drafts repetitions of a sequence's own text."""

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
        confidence = longest.bit_length() - 2  # 0, 1, 2, 3 from 2, 4, 8, 16 tokens on
        return merge(chains, budget, confidence)


class _Index:
    """The places (next positions) after each run of tokens."""

    def __init__(self) -> None:
        self._runs = [_Runs(size) for size in _SIZES]
        self._length = 0

    def extend(self, known: list[int]) -> None:
        for runs in self._runs:
            runs.extend(known, self._length)
        self._length = len(known)

    def matches(self, known: list[int]) -> list[tuple[int, int]]:
        """(length, place) of earlier occurrences of the end: longest, then latest first."""
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
    """The places after runs of `size` tokens, each linked to the one before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: dict[bytes, int] = {}
        self._before = array("i", [-1]) * size
        """Previous place of the same run, by place; -1: none."""

    def extend(self, known: list[int], length: int) -> None:
        last, before = self._last, self._before
        first = max(length, self.size)
        data = _key(known[first - self.size : -1])
        step = self._before.itemsize
        width = step * self.size
        for place, start in enumerate(range(0, len(data) - width + 1, step), first):
            run = data[start : start + width]
            before.append(last.get(run, -1))
            last[run] = place
        while len(last) > _MAX_RUNS:
            del last[next(iter(last))]

    def places(self, run: bytes) -> Iterator[int]:
        place = self._last.get(run, -1)
        for _ in range(_MAX_PLACES):
            if place < 0:
                return
            yield place
            place = self._before[place]


def _key(tokens: list[int]) -> bytes:
    """Runs as bytes: faster than tuples, and ignored by the garbage collector."""
    return array("i", tokens).tobytes()


def _match_length(known: list[int], place: int, size: int) -> int:
    length, max_length = size, min(_MAX_MATCH, place)
    while length < max_length and known[place - length - 1] == known[-length - 1]:
        length += 1
    return length


def _continuation(known: list[int], start: int, length: int) -> list[int]:
    period = len(known) - start
    return [known[start + i % period] for i in range(length)]
