"""The guard around a proposer."""

import logging
import operator
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple, cast
from weakref import finalize

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import DepthProposer, Pays, Proposer, SequenceView, always_pays

MAX_CONFIDENCE = 31

_log = logging.getLogger("headrace.engine")


class Guard:
    """Calls a proposer; a call that fails or returns no valid draft trees gives no draft.

    Python cannot stop a thread, so a call beyond the time limit is abandoned, and the proposer is
    retired. The call may still read the engine's state but never changes it. In the engine's
    thread the call runs to its end. `clock` returns seconds.
    """

    def __init__(
        self, proposer: Proposer, vocab_size: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.traits = proposer.traits
        self.failures = 0
        self.retired = False
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._clock = clock
        self._worker = None if self.traits.in_engine_thread else _Worker(self.traits.time_limit)

    def propose(
        self, seqs: list[SequenceView], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        """Return a valid draft for each sequence; the proposer sees only sequences with a
        budget.
        """
        drafts = [NO_DRAFT] * len(seqs)
        indices = [i for i, budget in enumerate(budgets) if budget > 0]
        if not indices:
            return drafts
        chosen_seqs, chosen_budgets = [seqs[i] for i in indices], [budgets[i] for i in indices]

        def propose() -> list[DraftTree]:
            if not self.traits.width:
                return self._proposer.propose(chosen_seqs, chosen_budgets)
            proposer = cast(DepthProposer, self._proposer)
            return proposer.propose(
                chosen_seqs, chosen_budgets, lambda i, path: pays(indices[i], path)
            )

        proposed = self._call(propose)
        if proposed is None or self.retired:
            return drafts
        try:
            pairs = list(zip(indices, proposed, strict=True))
        except Exception as error:  # a failing proposer must not end the step
            self._count_failure(error)
            return drafts
        for i, draft in pairs:
            if draft is not NO_DRAFT:
                drafts[i] = self._checked(draft, budgets[i])
        return drafts

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        self._call(lambda: self._proposer.observe(seqs, commits, result), returns=False)

    def close(self) -> None:
        del self._proposer

    def _call(self, function: Callable[[], Any], *, returns: bool = True) -> Any:
        if self.retired:
            return None
        try:
            value = self._worker.call(function) if self._worker else self._call_here(function)
        except Exception as error:
            self.retired = isinstance(error, _TimeLimitError)
            self._count_failure(error)
            return None
        if returns and value is None:
            self.failures += 1
        return value

    def _count_failure(self, error: Exception) -> None:
        """Count a failure, and log the first one with its traceback."""
        self.failures += 1
        if self.failures == 1:
            reason = (
                f"its call took more than {self.traits.time_limit} s" if self.retired else error
            )
            _log.warning(
                "%s failed, and drafted nothing: %s (%s); no token changes, but answers may be "
                "slower. Further failures are counted in the statistics",
                *(type(self._proposer).__name__, reason, type(error).__name__),
                exc_info=None if self.retired else error,
            )

    def _call_here(self, function: Callable[[], Any]) -> Any:
        limit, start = self.traits.time_limit, self._clock()
        value = function()
        if limit is not None and self._clock() - start > limit:
            raise _TimeLimitError
        return value

    def _checked(self, draft: DraftTree, budget: int) -> DraftTree:
        """The draft with plain ints, or no draft if it is not valid."""
        try:
            tokens = [operator.index(token) for token in draft.tokens]
            parents = [operator.index(parent) for parent in draft.parents]
            confidence = _checked_confidence(draft)
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
            return NO_DRAFT
        return DraftTree(
            tokens=tokens,
            parents=parents,
            confidence=confidence,
            indivisible=bool(draft.indivisible),
            probabilities=probabilities,
        )


def _checked_confidence(draft: DraftTree) -> int | list[int]:
    """The classes as plain ints within their limits. Raises ValueError without one per node."""

    def checked(confidence: Any) -> int:
        return min(max(operator.index(confidence), 0), MAX_CONFIDENCE)

    if not isinstance(draft.confidence, list):
        return checked(draft.confidence)
    if len(draft.confidence) != len(draft.tokens):
        raise ValueError("a draft needs a confidence for each node")
    return [checked(confidence) for confidence in draft.confidence]


class _TimeLimitError(Exception): ...


class _Outcome(NamedTuple):
    value: Any
    error: Exception | None


class _Worker:
    """A thread for calls of up to `time_limit` seconds, which ends with this object."""

    def __init__(self, time_limit: float | None) -> None:
        self._time_limit = time_limit
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._thread: Thread | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function. Raises its error, or _TimeLimitError.

        There must be no call after _TimeLimitError: the old outcome may still arrive.
        """
        if self._thread is None:
            thread = Thread(
                target=_serve,
                args=(self._calls, self._outcomes),
                name="headrace-proposer",
                daemon=True,
            )
            thread.start()  # raises if the system has no thread left, which fails this call
            self._thread = thread
            finalize(self, self._calls.put, None)
        self._calls.put(function)
        try:
            outcome = self._outcomes.get(timeout=self._time_limit)
        except Empty:
            raise _TimeLimitError from None
        if outcome.error is not None:
            raise outcome.error
        return outcome.value


def _serve(
    calls: "SimpleQueue[Callable[[], Any] | None]", outcomes: "SimpleQueue[_Outcome]"
) -> None:
    while function := calls.get():
        try:
            outcome = _Outcome(function(), None)
        except Exception as error:
            outcome = _Outcome(None, error)
        # Both refer to sequences, which would otherwise live until the next call.
        del function
        outcomes.put(outcome)
        del outcome
