"""`DraftLearner`: the data of the training, new weights between two steps, and their roll-back."""

import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import WeakMethod

from headrace.batch import Commit
from headrace.errors import ClosedError
from headrace.logit_ops import StepResult
from headrace.proposer import SequenceView
from headrace.record import frozen
from headrace.speculation.learning.acceptance_watch import AcceptanceWatch
from headrace.speculation.learning.buffer import LearningBuffer
from headrace.speculation.learning.collector import Collector
from headrace.speculation.policy import DraftCandidate
from headrace.stats import LearningStats

if TYPE_CHECKING:
    from headrace.speculation.learning.trainer_process import TrainerProcess

METHOD = "draft_model"
"""The proposer that learns."""
_PATIENCE = 2.0
"""Seconds after which new weights no longer wait for an idle engine."""
_OPENING_PATIENCE = 30.0
"""Seconds after which new weights are read even if the engine is busy."""
_SILENCE = 300.0
"""Idle seconds without a message after which the trainer is taken to hang."""
_POLL = 0.5

_log = logging.getLogger("headrace.learning")

Weights = TypeVar("Weights")
Post = Callable[[Callable[[], None]], None]


class LearningItem(Protocol):
    """The part of a scheduled sequence that a learner reads."""

    @property
    def seq(self) -> SequenceView: ...
    @property
    def num_scheduled(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def rows(self) -> range: ...


@frozen(eq=False, kw_only=True)
class LearnerParts(Generic[Weights]):
    """What a learner needs of the loader, which knows files and programs."""

    weights: Weights
    """The weights at the start."""
    folder: Path | None
    """The folder of these weights if an earlier run learned them."""
    open: Callable[[Path], Weights]
    """Opens and checks the weights of a folder. Raises HeadraceError."""
    install: Callable[[Weights], None]
    """Compiles weights and gives them to the proposer, in the engine's thread."""
    keep: Callable[[Path | None], None]
    """Copies the weights of a folder to the folder of the user. None: no learned weights."""
    learns_from: Callable[[SequenceView], bool]
    setup: Mapping[str, Any]
    """The first message to the trainer."""
    close: Callable[[], None]
    """Removes temporary files."""


Item = TypeVar("Item", bound=LearningItem)


class DraftLearner(Generic[Weights]):
    """Learning from one engine. A failure ends the learning with one warning, never a step.

    `begin_step`, `observe`, `end_step` and `swap` are for the engine's thread.
    """

    def __init__(self, parts: LearnerParts[Weights], width: int, num_bytes: int) -> None:
        self._parts = parts
        self._buffer = LearningBuffer(width, num_bytes)
        self._collector = Collector(self._buffer, width)
        self._watch = AcceptanceWatch()
        self._weights, self._folder = parts.weights, parts.folder
        self._kept = parts.folder
        self._unused: deque[Path] = deque()
        """Folders that the reader removes."""
        self._earlier: tuple[Weights, Path | None] | None = None
        """The weights before the last ones, until their verdict."""
        self._candidate: tuple[Weights, Path, str, float] | None = None
        """Weights, their folder, the held-out figures and the time of arrival."""
        self._trainer: TrainerProcess | None = None
        self._reader: Thread | None = None
        self._forget: Callable[[str], None] = lambda method: None
        self._post: Callable[[], Post | None] = lambda: None
        self._is_off = self._is_closed = False
        self._slices = self._trained = self._swaps = self._rollbacks = 0

    def connect(self, forget: Callable[[str], None]) -> None:
        """`forget` makes the policy forget the acceptance of a method's earlier weights."""
        self._forget = forget

    def wake_with(self, post: Post) -> None:
        """Run swaps in an idle engine with `post`, a method that runs functions between steps."""
        self._post = WeakMethod(post)

    @property
    def trainer_pid(self) -> int | None:
        return self._trainer.pid if self._trainer else None

    def stats(self) -> LearningStats:
        return LearningStats(
            is_on=not self._is_off,
            tokens=self._collector.num_tokens,
            trained_tokens=self._trained,
            slices=self._slices,
            swaps=self._swaps,
            rollbacks=self._rollbacks,
            acceptance_before=self._watch.before,
            acceptance=self._watch.now,
        )

    # The engine's thread

    def begin_step(self) -> None:
        if not self._is_off:
            self._buffer.set_idle(False)
            self.swap(is_idle=False)

    def end_step(self, has_work: bool) -> None:
        if not self._is_off and not has_work:
            self._buffer.set_idle(True)
            self.swap(is_idle=True)

    def observe(
        self,
        commits: Iterable[tuple[Item, Commit]],
        results: Sequence[StepResult],
        candidates: Mapping[Item, Sequence[DraftCandidate]],
    ) -> None:
        """Learn from a finished step of one or several launches."""
        if self._is_off and not self._watch.is_open:
            return
        try:
            self._observe(commits, results, candidates)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _observe(
        self,
        commits: Iterable[tuple[Item, Commit]],
        results: Sequence[StepResult],
        candidates: Mapping[Item, Sequence[DraftCandidate]],
    ) -> None:
        seen: set[Item] = set()
        for item, commit in commits:
            # The first commit of a sequence belongs to it, further ones to its forks.
            if item in seen or not self._parts.learns_from(item.seq):
                continue
            seen.add(item)
            for candidate in candidates.get(item, ()):
                if candidate.method == METHOD and candidate.draft.tokens and commit.tokens:
                    self._watch.record(candidate.draft.tokens[0] == commit.tokens[0])
            self._watch.count_tokens(len(commit.tokens))
            rows = [*item.rows, *(item.rows.stop + node for node in commit.path)]
            position = item.end - item.num_scheduled
            for launch, result in enumerate(results):
                if result.taps is not None:
                    self._collector.add(item.seq, position + launch, result.taps, rows)
        verdict = self._watch.verdict()
        if verdict == "fell":
            self._roll_back()
        elif verdict:
            self._confirm()
        if self._trainer is None and self._buffer.written:
            self._start()

    def swap(self, *, is_idle: bool) -> None:
        """Give new weights to the proposer, if there are any and the engine has time."""
        candidate = self._candidate
        if candidate is None or (not is_idle and monotonic() - candidate[3] < _PATIENCE):
            return
        self._candidate = None
        weights, folder, figures, _ = candidate
        self._earlier = self._weights, self._folder
        if not self._install(weights, folder):
            return
        self._swaps += 1
        self._watch.begin(is_open=True)
        _log.info(
            "new draft weights %d after %d tokens: %s",
            self._swaps,
            self._collector.num_tokens,
            figures,
        )

    def _install(self, weights: Weights, folder: Path | None) -> bool:
        try:
            self._parts.install(weights)
        except Exception as error:
            self._fail(f"the new weights cannot be compiled: {error}")
            return False
        self._weights, self._folder = weights, folder
        self._forget(METHOD)
        return True

    def _roll_back(self) -> None:
        before, after, wrong = self._watch.before, self._watch.now, self._folder
        if self._earlier and self._install(*self._earlier):
            self._earlier = None
            self._rollbacks += 1
            if wrong:
                self._unused.append(wrong)
            self._watch.begin(is_open=False)
            _log.info("draft weights rolled back: acceptance %.3f, then %.3f", before, after)
            self._send("rolled back")

    def _confirm(self) -> None:
        if self._earlier and self._earlier[1]:
            self._unused.append(self._earlier[1])
        self._earlier = None
        before, after = self._watch.before, self._watch.now
        _log.info("draft weights kept: acceptance %.3f, then %.3f", before, after)
        self._send("kept")

    def _send(self, verdict: str) -> None:
        if self._trainer:
            self._trainer.send({"verdict": verdict})

    # The trainer

    def _start(self) -> None:
        assert self._buffer.descriptor is not None
        try:
            from headrace.speculation.learning.trainer_process import TrainerProcess

            self._trainer = TrainerProcess(self._parts.setup, self._buffer.descriptor)
            self._reader = Thread(target=self._read, name="headrace-learning", daemon=True)
            self._reader.start()
        except (OSError, RuntimeError) as error:
            self._fail(f"the trainer cannot start: {error}")

    def _read(self) -> None:
        trainer = self._trainer
        assert trainer
        try:
            silent_since = monotonic()
            while not self._is_off:
                messages = trainer.receive(_POLL)
                if messages is None:
                    self._fail(f"the trainer ended with status {trainer.end()}")
                    return
                for message in messages:
                    self._take(message)
                if messages or self._buffer.idle_seconds < 0:
                    silent_since = monotonic()
                if monotonic() - silent_since > _SILENCE:
                    self._fail(f"the trainer was silent for {_SILENCE:g} s")
                self._tidy()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            trainer.end()

    def _tidy(self) -> None:
        """Keep new weights, and remove the files of weights that no one needs."""
        if self._folder != self._kept:
            folder = self._folder
            self._parts.keep(folder)
            self._kept = folder
        while self._unused:
            shutil.rmtree(self._unused.popleft(), ignore_errors=True)

    def _take(self, message: Mapping[str, Any]) -> None:
        self._slices = message.get("slices", self._slices)
        self._trained = message.get("trained", self._trained)
        if error := message.get("error"):
            self._fail(str(error))
        if folder := message.get("folder"):
            self._wait_until_idle()
            weights = self._parts.open(Path(folder))
            self._candidate = weights, Path(folder), str(message["figures"]), monotonic()
            if post := self._post():
                with suppress(ClosedError):
                    post(self._swap_if_idle)

    def _wait_until_idle(self) -> None:
        """Wait for a pause of the engine: reading and encoding weights takes all cores."""
        deadline = monotonic() + _OPENING_PATIENCE
        while self._buffer.idle_seconds < 0 and monotonic() < deadline and not self._is_off:
            sleep(0.01)

    def _swap_if_idle(self) -> None:
        if not self._is_off and self._buffer.idle_seconds >= 0:
            self.swap(is_idle=True)

    def _fail(self, reason: str) -> None:
        """End the learning. The proposer keeps its weights, or gets the earlier ones if they were
        better.
        """
        if not self._is_off:
            self._is_off = True
            _log.warning("drafts learn no more, and all else goes on: %s", reason)

    def close(self) -> None:
        """End the trainer, and keep the last weights."""
        if self._is_closed:
            return
        self._is_closed = self._is_off = True
        self._collector.close()
        if self._trainer and self._reader:
            self._trainer.close()
            self._reader.join()
        try:
            self._tidy()
        except Exception as error:
            _log.warning("the draft weights were not kept: %s", error)
        self._parts.close()
        self._buffer.close()
