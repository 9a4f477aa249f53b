"""The guard between the engine and a proposer: any failure of the proposer gives no draft, and is
counted.
"""

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
"""Highest confidence of a draft tree; the lowest is 0."""


class Guard:
    """A wrapper of a proposer. A call that raises, or returns something other than valid draft
    trees, gives no draft and is counted.

    A proposer is called in a thread of its own unless its traits say otherwise. Python cannot stop
    a thread, so a call that takes longer than the time limit is abandoned and its proposer retired.
    It holds up this one step only, since the engine's state is given to it to read and not to
    change. A call in the engine's thread is waited for, and retires its proposer as well if it took
    longer than the limit. `clock` gives seconds.
    """

    def __init__(
        self, proposer: Proposer, vocab_size: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.traits = proposer.traits
        self.failures = 0
        self.retired = False
        """Whether a call took too long; the proposer is not called again."""
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._clock = clock
        self._worker = None if self.traits.in_engine_thread else _Worker(self.traits.time_limit)

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        """A valid draft for each sequence; the proposer is asked only for those with a budget."""
        drafts = [NO_DRAFT] * len(seqs)
        asked = [i for i, nodes in enumerate(budgets) if nodes > 0]
        if not asked:
            return drafts
        proposed = self._call(
            lambda: self._proposer.propose([seqs[i] for i in asked], [budgets[i] for i in asked])
        )
        if proposed is None or self.retired:
            return drafts
        try:
            pairs = list(zip(asked, proposed, strict=True))
        except Exception:  # a failing proposer must not end the step
            self.failures += 1
            return drafts
        for i, draft in pairs:
            if draft is not NO_DRAFT:
                drafts[i] = self._checked(draft, budgets[i])
        return drafts

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        """Let the proposer observe the step."""
        self._call(lambda: self._proposer.observe(seqs, commits, result), answers=False)

    def close(self) -> None:
        """Release the proposer, which must not be called again."""
        del self._proposer

    def _call(self, function: Callable[[], Any], *, answers: bool = True) -> Any:
        """What the function returns, or None if it fails; with `answers`, a return value of None
        counts as a failure.
        """
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
        """What the function returns in this thread; raises _TookTooLongError if it took longer than
        the limit.
        """
        limit, begun = self.traits.time_limit, self._clock()
        answer = function()
        if limit is not None and self._clock() - begun > limit:
            raise _TookTooLongError
        return answer

    def _checked(self, draft: DraftTree, budget: int) -> DraftTree:
        """The draft with plain ints, or no draft if it is not a valid tree within the budget."""
        try:
            tokens, parents = (
                [operator.index(t) for t in draft.tokens],
                [operator.index(p) for p in draft.parents],
            )
            confidence = min(max(operator.index(draft.confidence), 0), MOST_CONFIDENT)
            valid = (
                len(tokens) == len(parents) <= budget
                and all(0 <= token < self._vocab_size for token in tokens)
                and all(-1 <= parent < node for node, parent in enumerate(parents))
            )
            probabilities = draft.probabilities
            valid = valid and (
                probabilities is None or probabilities.shape == (len(tokens), self._vocab_size)
            )
        except Exception:
            valid = False
        if not valid:
            self.failures += 1
        return (
            DraftTree(tokens, parents, confidence, bool(draft.indivisible), probabilities)
            if valid
            else NO_DRAFT
        )


class _TookTooLongError(Exception):
    """A call took longer than the time limit."""


class _Answer(NamedTuple):
    value: Any
    error: Exception | None


class _Worker:
    """A thread that makes calls, each waited for at most `time_limit` seconds. It ends when the
    worker is collected.
    """

    def __init__(self, time_limit: float | None) -> None:
        self._time_limit = time_limit
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._thread: Thread | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises. After a _TookTooLongError there must be no other
        call, as its answer may yet come.
        """
        if self._thread is None:
            thread = Thread(
                target=_serve,
                args=(self._calls, self._answers),
                name="headrace-proposer",
                daemon=True,
            )
            thread.start()  # raises where there is none to be had, which is a failure of this call
            self._thread = thread
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
        del function  # it refers to sequences, which would live until the next call
        answers.put(answer)
        del answer
