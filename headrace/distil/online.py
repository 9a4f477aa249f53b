"""The process that trains a drafter while an engine serves (Liu et al. 2024).

It runs at the lowest priority, in slices, and only while the engine is idle. A candidate has to
draft better on held-out windows that are new, and no worse on those that are old. The engine
replies to each candidate, after it has measured the acceptance of real drafts.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import sqrt
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.planner.host import release_free_memory
from headrace.speculation.learning.buffer import LearningBuffer, Window

if TYPE_CHECKING:
    from headrace.distil.online_student import OnlineStudent, Score, Weights

_REST_SECONDS = 0.1
"""Seconds that the engine has to be idle before a slice."""
_HEARTBEAT = 1.0
_HELD_OUT = 5
"""Each window with a number that this divides is held out."""
_MAX_HELD_OUT = 48
_MIN_HELD_OUT = 8
_BATCH_WINDOWS = 4
_STEPS_PER_CANDIDATE = 8
_REPEATS = 8
"""Times that the trainer may see a window, on average."""
_PATIENCE = 10
"""Candidates in a row that are no better, before the training starts again."""
_MIN_GAIN = 0.01
"""Accepted drafts per step."""


class Gain(NamedTuple):
    """Difference of accepted drafts per step between weights, over windows."""

    mean: float
    error: float
    """Standard error of the mean."""


def gain(scores: "list[Score]", base: "list[Score]") -> Gain:
    """Compare the scores of the same windows."""
    chains = np.array([max(1, score.chains) for score in scores], float)
    differences = np.array(
        [a.accepted - b.accepted for a, b in zip(scores, base, strict=True)], float
    )
    mean = differences.sum() / chains.sum()
    spread = differences - mean * chains
    error = sqrt(float((spread**2).sum()) * len(chains) / max(1, len(chains) - 1)) / chains.sum()
    return Gain(float(mean), error)


class Trainer:
    """Trains one student by the windows of a buffer."""

    def __init__(
        self,
        student: "OnlineStudent",
        buffer: LearningBuffer,
        original: "Weights",
        out: Path,
        has_learned: bool,
    ) -> None:
        """`original` are the weights of the user's drafter; the student may have others already,
        which an earlier run learned.
        """
        self._student = student
        self._buffer = buffer
        self._out = out
        self._original = original
        self._accepted = original
        if has_learned:
            self._accepted = student.weights()
        self._candidate: Weights | None = None
        self._waits = False
        self._scores: dict[tuple[int, int], Score] = {}
        """By `id` of weights that are kept, and window."""
        self._rng = np.random.default_rng(0)
        self._num_failed = self._num_candidates = 0
        self._num_drawn = self._steps = 0
        self.trained = self.slices = 0

    def answer(self, verdict: str) -> None:
        """Take the engine's verdict on a candidate."""
        if self._candidate is None:
            return
        if verdict == "kept":
            self._accepted = self._candidate
        self._restart()
        self._candidate, self._waits = None, False

    def _restart(self) -> None:
        """Go on from the accepted weights."""
        self._student.use(self._accepted)
        self._num_failed = self._steps = 0
        ids = {id(self._accepted), id(self._original)}
        self._scores = {key: score for key, score in self._scores.items() if key[0] in ids}

    def work(self) -> Iterator[dict[str, Any]]:
        """Yield after each slice, with a message or nothing. The caller may take its time."""
        while True:
            if self._waits or not (windows := self._batch()):
                sleep(0.05)
                yield {}
                continue
            for num_tokens in self._student.learn(windows):
                self.slices += 1
                self.trained += num_tokens
                yield {}
            self._student.update()
            self.slices += 1
            self._steps += 1
            yield {}
            if self._steps % _STEPS_PER_CANDIDATE == 0:
                yield from self._evaluate()

    def _batch(self) -> list[Window]:
        """Draw windows to train on; none if all were seen often enough."""
        last = self._buffer.written
        first = max(1, last - self._buffer.num_windows + 1)
        numbers = [n for n in range(first, last + 1) if n % _HELD_OUT]
        if len(numbers) < _BATCH_WINDOWS or self._num_drawn >= _REPEATS * last:
            return []
        chosen = self._rng.choice(numbers, _BATCH_WINDOWS, replace=False)
        self._num_drawn += _BATCH_WINDOWS
        windows = [self._buffer.read(int(number)) for number in chosen]
        return [window for window in windows if window]

    def _evaluate(self) -> Iterator[dict[str, Any]]:
        """Score the present weights, and offer them if they are better."""
        windows = self._held_out()
        if len(windows) < _MIN_HELD_OUT:
            return
        present: Weights = self._student.weights()
        kinds = {"present": present, "accepted": self._accepted, "original": self._original}
        scores: dict[str, list[Score]] = {name: [] for name in kinds}
        for name, weights in kinds.items():
            for window in windows:
                key = id(weights), window.number
                if key not in self._scores:
                    self._scores[key] = self._student.score(weights, window)
                    self.slices += 1
                    yield {}
                scores[name].append(self._scores[key])
        self._scores = {key: score for key, score in self._scores.items() if key[0] != id(present)}
        self._forget_old(windows)
        release_free_memory()

        if self._accepted is not self._original and _is_better(
            scores["original"], scores["accepted"]
        ):
            yield self._offer(self._original, scores["original"], scores["accepted"])
        elif _is_better(scores["present"], scores["accepted"]):
            yield self._offer(present, scores["present"], scores["accepted"])
        else:
            self._num_failed += 1
            if self._num_failed >= _PATIENCE:
                self._restart()

    def _held_out(self) -> list[Window]:
        """Read held-out windows, old ones first: all, or some of the whole buffer."""
        last = self._buffer.written
        first = max(1, last - self._buffer.num_windows + 1)
        numbers = [n for n in range(first, last + 1) if n % _HELD_OUT == 0]
        if len(numbers) > _MAX_HELD_OUT:
            old = numbers[: -_MAX_HELD_OUT // 2]
            step = len(old) / (_MAX_HELD_OUT // 2)
            spread = [old[int(i * step)] for i in range(_MAX_HELD_OUT // 2)]
            numbers = [*spread, *numbers[-_MAX_HELD_OUT // 2 :]]
        windows = [self._buffer.read(number) for number in numbers]
        return [window for window in windows if window]

    def _forget_old(self, windows: list[Window]) -> None:
        numbers = {window.number for window in windows}
        self._scores = {key: score for key, score in self._scores.items() if key[1] in numbers}

    def _offer(
        self, weights: "Weights", scores: "list[Score]", base: "list[Score]"
    ) -> dict[str, Any]:
        """Write weights for the engine, and return the message to it."""
        from headrace.distil.draft_files import write_drafter

        self._candidate, self._waits = weights, True
        self._num_candidates += 1
        student = self._student
        student.use(weights)
        folder = self._out / str(self._num_candidates)
        write_drafter(folder, student.spec, student.module, student.tokens, {})
        return {
            "folder": str(folder),
            "figures": f"{_per_step(base):.3f} held-out tokens a step before, now "
            f"{_per_step(scores):.3f}",
        }


def _is_better(scores: "list[Score]", base: "list[Score]") -> bool:
    """Whether weights draft better on the newer half of the windows, and no worse on the older."""
    half = len(scores) // 2
    newer, older = gain(scores[half:], base[half:]), gain(scores[:half], base[:half])
    return newer.mean > max(_MIN_GAIN, 2 * newer.error) and older.mean >= -max(
        _MIN_GAIN / 2, older.error
    )


def _per_step(scores: "list[Score]") -> float:
    accepted = sum(score.accepted for score in scores)
    return 1 + accepted / max(1, sum(score.chains for score in scores))


def make_trainer(setup: Mapping[str, Any]) -> tuple[Trainer, LearningBuffer]:
    """Open what the first message names."""
    import torch

    from headrace.checkpoint.drafters import open_drafter
    from headrace.checkpoint.load import open_checkpoint
    from headrace.distil.online_student import OnlineStudent, weights_of

    torch.set_num_threads(setup["threads"] or 1)
    target = open_checkpoint(Path(setup["model"]))
    original = open_drafter(Path(setup["original"]), target)
    current = open_drafter(Path(setup["current"]), target)
    student = OnlineStudent(original, setup["learning_rate"])
    student.use(weights_of(current))
    buffer = LearningBuffer(setup["width"], setup["num_bytes"], setup["descriptor"])
    has_learned = setup["current"] != setup["original"]
    out = Path(setup["out"])
    return Trainer(student, buffer, weights_of(original), out, has_learned), buffer


def serve(lines: Iterator[bytes]) -> None:
    """Train until stdin ends."""
    setup, verdicts = json.loads(next(lines)), SimpleQueue[str]()
    Thread(target=_listen, args=(lines, verdicts), daemon=True).start()
    trainer, buffer = make_trainer(setup)
    reported = 0.0
    for message in trainer.work():
        while True:
            with suppress(Empty):
                trainer.answer(verdicts.get_nowait())
            if message or monotonic() - reported > _HEARTBEAT:
                reported = monotonic()
                _send({**message, "slices": trainer.slices, "trained": trainer.trained})
                message = {}
            if buffer.idle_seconds > _REST_SECONDS:
                break
            sleep(0.01)


def _listen(lines: Iterator[bytes], verdicts: "SimpleQueue[str]") -> None:
    for line in lines:
        verdicts.put(json.loads(line)["verdict"])
    os._exit(0)


def _send(message: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def _step_back() -> None:
    """Run when no one else wants to, and be the first to go when memory is short."""
    with suppress(OSError):
        os.nice(19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(*, in_background: bool = True) -> None:
    """Serve an engine. An error goes to the engine, which ends the learning."""
    if in_background:
        _step_back()
    try:
        serve(iter(sys.stdin.buffer.readline, b""))
    except BrokenPipeError:
        os._exit(0)
    except Exception as error:
        with suppress(OSError):
            _send({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)


if __name__ == "__main__":
    main()
