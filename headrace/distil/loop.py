"""The training loop of all students.

The same options and seed give the same weights, to the bit, with the same torch and number of
threads, and whether or not the run was stopped in between: the batch of a step depends on seed and
step alone, and the state has all else.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from headrace.distil.curve import Curve, Point
from headrace.distil.state import Identity, Progress, load_state, save_state
from headrace.errors import HeadraceError
from headrace.measure.progress import ProgressCallback
from headrace.record import frozen

_WARM_UP = 20
"""Steps over which the learning rate rises. The speed is measured in them."""
_MEASURED = 8
"""The last steps of the warm-up whose time counts: the first ones are slower."""
_LAST_RATE = 0.05
"""Share of the learning rate at the end of the cosine."""
_EVALUATIONS = 12
_POINTS = 120
"""Points of the curve, about."""
_MAX_NORM = 1.0
"""Norm above which gradients are scaled down."""
_BETAS = 0.9, 0.95


Start = Callable[[ProgressCallback], None]


class Student(Protocol):
    """What the loop trains."""

    module: nn.Module

    def loss(self, step: int) -> tuple[Tensor, int]:
        """Return the loss of the batch of a step, and its number of tokens."""

    def evaluate(self) -> Mapping[str, float]:
        """Return figures over held-out texts, by name."""

    def summary(self, figures: Mapping[str, float]) -> str:
        """Return the figures in a few words, for the progress."""


@frozen(kw_only=True)
class TrainingOptions:
    """How long and how fast to train."""

    steps: int = 0
    """Number of steps; 0: as many as fit into `minutes`."""
    minutes: float = 30.0
    learning_rate: float = 1e-3
    rate_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the learning rate for parameters with these first parts of their names."""
    weight_decay: float = 0.01
    save_seconds: float = 60.0
    """Seconds between two states on disk."""


def train(
    student: Student,
    state: Path,
    options: TrainingOptions,
    identity: Identity,
    on_progress: ProgressCallback,
    start: Start | None = None,
) -> Curve:
    """Train a student, or go on from the file `state`, and return the curve.

    `start` sets the first weights of a training without a state.

    Raises RequestError if the state is of another training (`identity`), and HeadraceError if the
    loss is not finite or the disk refuses the state; the last whole state is kept.
    """
    run = _Run(student, state, options, identity)
    run.restore(start, on_progress)
    while not run.is_done:
        run.step(on_progress)
    return run.progress.curve


class _Run:
    def __init__(
        self, student: Student, state: Path, options: TrainingOptions, identity: Identity
    ) -> None:
        self._student = student
        self._state = state
        self._options = options
        self._identity = identity
        self._optimiser = _optimiser(student.module, options)
        self._speed = 0.0  # tokens per second
        self._step_seconds: list[float] = []
        self._saved_at = time.monotonic()
        self.progress = Progress(num_steps=options.steps)

    def restore(self, start: Start | None, on_progress: ProgressCallback) -> None:
        """Load the state, or set and evaluate the first weights."""
        found = load_state(self._state, self._student.module, self._optimiser, self._identity)
        if found:
            self.progress = found
        else:
            if start:
                start(on_progress)
            self._add_point(self._student.evaluate())

    @property
    def is_done(self) -> bool:
        return 0 < self.progress.num_steps <= self.progress.step

    def step(self, on_progress: ProgressCallback) -> None:
        started = time.monotonic()
        loss, num_tokens = self._update()
        seconds = time.monotonic() - started
        self._step_seconds = [*self._step_seconds[-_MEASURED:], seconds]
        self._speed = num_tokens / seconds if not self._speed else self._speed
        self._speed += 0.1 * (num_tokens / seconds - self._speed)

        done = self.progress
        self.progress = replace(
            done,
            step=done.step + 1,
            seconds=done.seconds + seconds,
            loss_sum=done.loss_sum + loss,
            loss_count=done.loss_count + 1,
        )
        if self.progress.step == _WARM_UP and not self.progress.num_steps:
            self.progress = replace(self.progress, num_steps=self._num_steps())
        self._evaluate()
        self._report(on_progress, loss)
        if self.is_done or time.monotonic() - self._saved_at >= self._options.save_seconds:
            module, progress = self._student.module, self.progress
            save_state(self._state, module, self._optimiser, progress, self._identity)
            self._saved_at = time.monotonic()

    def _update(self) -> tuple[float, int]:
        """Take a step, and return its loss and number of tokens."""
        rate = learning_rate(self._options.learning_rate, self.progress)
        for group in self._optimiser.param_groups:
            group["lr"] = rate * group["share"]
        self._optimiser.zero_grad()
        loss, num_tokens = self._student.loss(self.progress.step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._student.module.parameters(), _MAX_NORM)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise HeadraceError(
                f"the loss of step {self.progress.step + 1:,} is {loss.item():g}, its gradient "
                f"{norm.item():g}; repeat the command with a lower --learning-rate (here "
                f"{self._options.learning_rate:g}): it goes on from the last whole state, or from "
                f"the start if you remove {self._state}"
            )
        self._optimiser.step()
        return loss.item(), num_tokens

    def _num_steps(self) -> int:
        """The steps that fit into the minutes, at the measured speed."""
        per_step = sorted(self._step_seconds)[len(self._step_seconds) // 2]
        left = 60 * self._options.minutes - self.progress.seconds
        return _WARM_UP + max(1, int(left / per_step))

    def _evaluate(self) -> None:
        step, num_steps = self.progress.step, self.progress.num_steps
        if not num_steps:
            return
        if self.is_done or step % max(1, num_steps // _EVALUATIONS) == 0:
            started = time.monotonic()
            figures = self._student.evaluate()
            seconds = self.progress.seconds + time.monotonic() - started
            self.progress = replace(self.progress, seconds=seconds)
            self._add_point(figures)
        elif step % max(1, num_steps // _POINTS) == 0:
            self._add_point({})

    def _add_point(self, figures: Mapping[str, float]) -> None:
        done = self.progress
        loss = done.loss_sum / done.loss_count if done.loss_count else None
        point = Point(step=done.step, seconds=done.seconds, loss=loss, held_out=figures)
        self.progress = replace(
            done, curve=done.curve.with_point(point), loss_sum=0.0, loss_count=0
        )

    def _report(self, on_progress: ProgressCallback, loss: float) -> None:
        done, evaluated = self.progress, self.progress.curve.evaluated
        in_all = f" of {done.num_steps:,}" if done.num_steps else ""
        words = [f"step {done.step:,}{in_all}", f"loss {loss:.3f}"]
        if evaluated:
            words.append(self._student.summary(evaluated[-1].held_out))
        words.append(f"{self._speed:,.0f} tokens/s")
        seconds = 60 * self._options.minutes
        share = done.step / done.num_steps if done.num_steps else min(1.0, done.seconds / seconds)
        on_progress(f"training; {', '.join(words)}", share)


def learning_rate(rate: float, progress: Progress) -> float:
    """The rate of the next step: a linear rise, then half a cosine (Loshchilov and Hutter 2017)."""
    if progress.step < _WARM_UP:
        return rate * (progress.step + 1) / _WARM_UP
    left = max(1, progress.num_steps - _WARM_UP)
    share = (progress.step - _WARM_UP) / left
    return rate * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * share)) / 2)


def _optimiser(module: nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW, without decay of vectors."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        share = options.rate_shares.get(name.partition(".")[0], 1.0)
        decay = options.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((share, decay), []).append(parameter)
    settings = [
        {"params": parameters, "share": share, "weight_decay": decay}
        for (share, decay), parameters in groups.items()
    ]
    return torch.optim.AdamW(settings, betas=_BETAS, fused=True)
