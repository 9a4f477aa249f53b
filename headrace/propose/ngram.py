"""Prompt lookup: what followed the last few tokens when they came before, in the prompt or the output (Saxena 2023)."""

from weakref import WeakKeyDictionary

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.propose.trees import merge
from headrace.proposer import ProposerTraits, SequenceView

_SIZES = (8, 4, 2)
"""Lengths of the runs that are looked up, longest first."""
_PLACES = 4
"""Latest places kept of each run."""
_CANDIDATES = 3
"""Most places to take a continuation from."""
_LONGEST = 16
"""Tokens beyond which a match is not measured."""
_MOST_RUNS = 1 << 16
"""Runs kept of a sequence; the oldest go first."""


class NgramProposer:
    """Drafts that the text repeats itself. Microseconds for a sequence, and for each token that is new in it."""

    def __init__(self, max_nodes: int = 16) -> None:
        self.traits = ProposerTraits(max_nodes, in_engine_thread=True, time_limit=None)
        # An entry goes when its sequence does, whichever way that ends.
        self._indices: WeakKeyDictionary[SequenceView, _Index] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        return [self._draft(seq, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass  # the index reads what is known when it is asked

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
        chains = [_continuation(known, place, budget) for length, place in matches if 2 * length > longest]
        return merge(chains, budget, confidence=longest.bit_length() - 2)  # of matches of 2, 4, 8 and 16 tokens or more


class _Index:
    """Where each run of tokens was followed by something."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[int]] = {}  # run -> positions after it, ascending
        self._length = 0

    def extend(self, known: list[int]) -> None:
        places = self._places
        for position in range(self._length, len(known)):
            for size in _SIZES:
                if size <= position:
                    run = tuple(known[position - size : position])
                    found = places.get(run)
                    if found is None:
                        places[run] = [position]
                    else:
                        found.append(position)
                        if len(found) > _PLACES:
                            del found[0]
        self._length = len(known)
        while len(places) > _MOST_RUNS:
            del places[next(iter(places))]

    def matches(self, known: list[int]) -> list[tuple[int, int]]:
        """(length, position after it) of runs that end the sequence and came before: the longest first, then the latest."""
        found: dict[int, int] = {}
        for size in _SIZES:
            for place in reversed(self._places.get(tuple(known[-size:]), ())):
                if place not in found:
                    found[place] = _match_length(known, place, size)
            if len(found) >= _CANDIDATES:
                break
        return sorted(((length, place) for place, length in found.items()), reverse=True)[:_CANDIDATES]


def _match_length(known: list[int], place: int, size: int) -> int:
    """How many tokens before `place` are those that end the sequence, given that `size` are."""
    length, most = size, min(_LONGEST, place)
    while length < most and known[place - length - 1] == known[-length - 1]:
        length += 1
    return length


def _continuation(known: list[int], start: int, length: int) -> list[int]:
    """What follows `start`, as if the text from there on repeated for ever."""
    chain = known[start : start + length]
    period = len(known) - start
    while len(chain) < length:
        chain += chain[len(chain) - period : len(chain) - period + length - len(chain)]
    return chain
