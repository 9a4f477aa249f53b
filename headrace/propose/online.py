"""A table of what followed what in the outputs of requests that it drafted for: it learns while the engine serves.

Where requests are alike, and answers repeat across them, it drafts what no single prompt holds. What one request taught it is for
those of the same cache salt only: how fast an answer comes hints at what others were answered, as with any cache that is shared.
"""

from collections import deque
from collections.abc import Hashable
from weakref import WeakKeyDictionary, finalize

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.propose.trees import merge
from headrace.proposer import ProposerTraits, SequenceView

_SIZES = (8, 4, 2)
"""Lengths of the runs that are looked up, longest first."""
_FOLLOWERS = 2
"""Different tokens kept after a run, the latest first."""


class OnlineProposer:
    """Drafts that outputs repeat each other. At most `max_runs` runs, the least recently used go first."""

    def __init__(self, max_nodes: int = 16, max_runs: int = 1 << 16) -> None:
        self.traits = ProposerTraits(max_nodes, in_engine_thread=True, time_limit=None)
        self._max_runs = max_runs
        self._followers: dict[tuple[Hashable, ...], list[int]] = {}  # in the order of last use
        self._lessons: WeakKeyDictionary[SequenceView, _Lesson] = WeakKeyDictionary()
        self._ended = deque[_Lesson]()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        # Learning waits until there is something to ask: many tokens at once take far less time than one by one between steps.
        while self._ended:
            self._learn(self._ended.popleft())
        return [self._draft(self._follow(seq), nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass  # it reads what is known when it is asked, or when a sequence has ended

    def _follow(self, seq: SequenceView) -> "_Lesson":
        """What there is of a sequence, all of it learned."""
        lesson = self._lessons.get(seq)
        if lesson is None:
            lesson = self._lessons[seq] = _Lesson(seq)
            finalize(seq, self._ended.append, lesson).atexit = False
        self._learn(lesson)
        return lesson

    def _draft(self, lesson: "_Lesson", budget: int) -> DraftTree:
        tail = lesson.known[-_SIZES[0] :]
        found = self._look_up(lesson.scope, tail)
        if found is None:
            return NO_DRAFT
        size, followers = found
        chains = [[token, *self._walk(lesson.scope, [*tail, token], budget - 1)] for token in followers]
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

    def _learn(self, lesson: "_Lesson") -> None:
        known, table = lesson.known, self._followers
        for position in range(lesson.learned, len(known)):
            token = known[position]
            for size in _SIZES:
                if size <= position:
                    run = (lesson.scope, *known[position - size : position])
                    followers = table.pop(run, None)
                    if followers is None:
                        followers = [token]
                    elif followers[0] != token:
                        followers = [token, *(other for other in followers if other != token)][:_FOLLOWERS]
                    table[run] = followers
        lesson.learned = len(known)
        while len(table) > self._max_runs:
            del table[next(iter(table))]


class _Lesson:
    """What there is to learn from a sequence; lives on when the sequence has ended."""

    def __init__(self, seq: SequenceView) -> None:
        self.scope = seq.scope
        self.known = seq.known
        """The sequence's own list, which grows."""
        self.learned = seq.prompt_len
        """Tokens that the table has: only outputs teach it."""
