"""The guard between the engine and a proposer: whatever goes wrong there becomes no draft, and counts."""

import operator
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple
from weakref import finalize

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import Proposer, SequenceView

MOST_CONFIDENT = 7


class Guard:
    """A proposer around another. What the inner one raises, or returns that is no draft tree, becomes no draft, and counts.

    A proposer is called in a thread of its own unless its traits say otherwise. Python cannot stop a thread: a call that takes
    longer than the time limit is left to itself, its proposer is retired, and all that it can hold up is that one step. What it
    would need to hold up more, the engine's state, it has only been given to read. A call in the engine's thread is waited for, and
    retires its proposer in the same way if it took longer than the limit. `clock` gives seconds.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, clock: Callable[[], float] = perf_counter) -> None:
        self.traits = proposer.traits
        self.failures = 0
        self.retired = False
        """Whether a call took too long, so that there will be no other."""
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._clock = clock
        self._worker = None if self.traits.in_engine_thread else _Worker(self.traits.time_limit)

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        """A sound draft for each sequence; the proposer is not asked for those without a budget."""
        drafts = [NO_DRAFT] * len(seqs)
        asked = [i for i, nodes in enumerate(budgets) if nodes > 0]
        if not asked:
            return drafts
        proposed = self._call(lambda: self._proposer.propose([seqs[i] for i in asked], [budgets[i] for i in asked]))
        if proposed is None or self.retired:
            return drafts
        try:
            pairs = list(zip(asked, proposed, strict=True))
        except Exception:  # whatever a proposer does wrong, the step goes on
            self.failures += 1
            return drafts
        for i, draft in pairs:
            if draft is not NO_DRAFT:
                drafts[i] = self._checked(draft, budgets[i])
        return drafts

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        """Pass it on."""
        self._call(lambda: self._proposer.observe(seqs, commits, result), answers=False)

    def close(self) -> None:
        """Let go of the proposer; it is not called again."""
        del self._proposer

    def _call(self, function: Callable[[], Any], *, answers: bool = True) -> Any:
        """What the function returns; None where it fails, or is expected to answer and does not."""
        if self.retired:
            return None
        try:
            answer = self._worker.call(function) if self._worker else self._call_here(function)
        except Exception as error:
            self.retired = isinstance(error, _TookTooLongError)
            self.failures += 1
            return None
        if answers and answer is None:
            self.failures += 1
        return answer

    def _call_here(self, function: Callable[[], Any]) -> Any:
        limit, begun = self.traits.time_limit, self._clock()
        answer = function()
        if limit is not None and self._clock() - begun > limit:
            raise _TookTooLongError
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
        return DraftTree(tokens, parents, confidence, bool(draft.indivisible), probabilities) if sound else NO_DRAFT


class _TookTooLongError(Exception):
    """There was no answer in time."""


class _Answer(NamedTuple):
    value: Any
    error: Exception | None


class _Worker:
    """One thread that makes calls, and is waited for so long and no longer. It ends with its owner."""

    def __init__(self, time_limit: float | None) -> None:
        self._time_limit = time_limit
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._thread: Thread | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises; raises _TookTooLongError when it takes too long, after which there must be no other call."""
        if self._thread is None:
            self._thread = Thread(target=_serve, args=(self._calls, self._answers), name="headrace-proposer", daemon=True)
            self._thread.start()
            finalize(self, self._calls.put, None)
        self._calls.put(function)
        try:
            answer = self._answers.get(timeout=self._time_limit)
        except Empty:
            raise _TookTooLongError from None
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
