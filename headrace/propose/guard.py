"""The guard between the engine and a proposer: whatever goes wrong there becomes no draft, and counts."""

import operator
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple
from weakref import finalize

from headrace.batch import NO_DRAFT, Commit, DraftTree, Proposer, SequenceView, StepRows

PATIENCE = 1.0
"""Seconds that a proposer may take for one call."""
MOST_CONFIDENT = 7


class Guard:
    """A proposer around another. What the inner one raises, or returns that is no draft tree, becomes no draft.

    A proposer that does not promise to be quick (see `Proposer`) works in a thread of its own. Python cannot stop a thread: one
    that takes longer than `patience` seconds is left to itself, its proposer is not asked again, and all it can hold up is
    that one step. What it would need to hold up more, the engine's state, it has only been given to read.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, patience: float = PATIENCE) -> None:
        self.max_nodes = proposer.max_nodes
        self.needs_rows = bool(getattr(proposer, "needs_rows", False))
        self.width = int(getattr(proposer, "width", 0))
        self.failures = 0
        self.hung = False
        """Whether it took too long once, and was left behind."""
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._worker = None if getattr(proposer, "bounded", False) else _Worker(patience)

    def propose(self, seqs: list[SequenceView], budget: list[int]) -> list[DraftTree]:
        """A sound draft for each sequence; those without room are not asked for."""
        drafts = [NO_DRAFT] * len(seqs)
        asked = [i for i, nodes in enumerate(budget) if nodes > 0]
        if not asked:
            return drafts
        proposed = self._call(lambda: self._proposer.propose([seqs[i] for i in asked], [budget[i] for i in asked]))
        if proposed is None or self.hung:
            return drafts
        try:
            pairs = list(zip(asked, proposed, strict=True))
        except Exception:  # whatever a proposer does wrong, the step goes on
            self.failures += 1
            return drafts
        for i, draft in pairs:
            if draft is not NO_DRAFT:
                drafts[i] = self._checked(draft, budget[i])
        return drafts

    def observe(self, seqs: list[SequenceView], commits: list[Commit], rows: StepRows) -> None:
        """Pass it on."""
        self._call(lambda: self._proposer.observe(seqs, commits, rows), answers=False)

    def close(self) -> None:
        """Let go of the proposer; it is not called again."""
        del self._proposer

    def _call(self, function: Callable[[], Any], *, answers: bool = True) -> Any:
        """What the function returns; None where it fails, or is expected to answer and does not."""
        if self.hung:
            return None
        try:
            answer = self._worker.call(function) if self._worker else function()
        except Exception as error:
            self.hung = isinstance(error, _Hung)
            self.failures += 1
            return None
        if answers and answer is None:
            self.failures += 1
        return answer

    def _checked(self, draft: DraftTree, budget: int) -> DraftTree:
        try:
            tokens, parents = [operator.index(t) for t in draft.tokens], [operator.index(p) for p in draft.parents]
            confidence = min(max(operator.index(draft.confidence), 0), MOST_CONFIDENT)
            sound = (
                len(tokens) == len(parents) <= budget
                and all(0 <= token < self._vocab_size for token in tokens)
                and all(-1 <= parent < node for node, parent in enumerate(parents))
            )
            probabilities = draft.probabilities
            sound = sound and (probabilities is None or probabilities.shape == (len(tokens), self._vocab_size))
        except Exception:
            sound = False
        if not sound:
            self.failures += 1
        return DraftTree(tokens, parents, confidence, bool(draft.whole), probabilities) if sound else NO_DRAFT


class _Hung(Exception):
    """There was no answer in time."""


class _Answer(NamedTuple):
    value: Any
    error: Exception | None


class _Worker:
    """One thread that makes calls, and is waited for so long and no longer. It ends with its owner."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._thread: Thread | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises; raises _Hung when it takes too long, after which there must be no other call."""
        if self._thread is None:
            self._thread = Thread(target=_serve, args=(self._calls, self._answers), name="headrace-proposer", daemon=True)
            self._thread.start()
            finalize(self, self._calls.put, None)
        self._calls.put(function)
        try:
            answer = self._answers.get(timeout=self._patience)
        except Empty:
            raise _Hung from None
        if answer.error is not None:
            raise answer.error
        return answer.value


def _serve(calls: "SimpleQueue[Callable[[], Any] | None]", answers: "SimpleQueue[_Answer]") -> None:
    while function := calls.get():
        try:
            answer = _Answer(function(), None)
        except Exception as error:
            answer = _Answer(None, error)
        del function  # or the last sequences would live until the next call
        answers.put(answer)
        del answer
