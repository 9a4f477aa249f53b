"""An executable without arithmetic: a launch takes the predicted time of its step.

Stages of a pipeline work on several launches at once. The engine's own work goes on while a GPU
computes; a CPU does one after the other.
"""

from collections.abc import Sequence
from operator import sub
from typing import NamedTuple, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from headrace.backend import expert_table
from headrace.batch import DraftTree, Ints, RaggedBatch
from headrace.logit_ops import (
    LogitOp,
    LogitOpResult,
    SampleOp,
    SampleResult,
    ShiftedSampleOps,
    StepResult,
)
from headrace.program.op import StepSize
from headrace.simulator.clock import VirtualClock

TOKEN = 0
"""The token of every plain step, and of every accepted draft."""
OTHER_TOKEN = 1
"""The token after a rejected draft."""
_PLAIN: LogitOpResult = SampleResult([TOKEN], [], [])


class StepCosts(Protocol):
    """Predicts the times of a step."""

    @property
    def request_seconds(self) -> float:
        """Seconds of the engine's own work on a new request."""

    @property
    def schedule_seconds(self) -> float:
        """Seconds of the engine's own work on a step, once for a run of plain launches."""

    def stage_seconds(self, step: StepSize) -> Sequence[float]:
        """Seconds of each pipeline stage."""

    def host_seconds(self, step: StepSize) -> float:
        """Seconds of the engine's own work on each launch."""


class TimedTicket(NamedTuple):
    """Results that are ready at a time."""

    clock: VirtualClock
    end: float
    result: StepResult

    @property
    def ready(self) -> bool:
        return self.clock.now >= self.end

    def wait(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.end)
        return self.result


class TimedExecutable:
    """Takes the time of each step. A draft token is accepted with a fixed probability."""

    def __init__(
        self,
        clock: VirtualClock,
        costs: StepCosts,
        *,
        kv_bytes: float,
        max_in_flight: int = 1,
        acceptance: float = 0.0,
        rng: Generator | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self._clock = clock
        self._costs = costs
        self._kv_bytes = kv_bytes
        self._acceptance = acceptance
        self._rng = rng or np.random.default_rng(0)
        self._free: list[float] = []
        """Time at which each stage has finished its launches."""

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> TimedTicket:
        step = self._size(batch)
        self._clock.now += self._costs.host_seconds(step)
        if not isinstance(ops, ShiftedSampleOps):  # the first launch of its step
            self._clock.now += self._costs.schedule_seconds
        end = self._run(self._costs.stage_seconds(step))
        ticket = TimedTicket(self._clock, end, StepResult(self._sample(ops, step)))
        if self.max_in_flight == 1:
            ticket.wait()
        return ticket

    def _size(self, batch: RaggedBatch) -> StepSize:
        ends = batch.row_start.tolist()
        rows = map(sub, ends[1:], ends)
        seqs = tuple(zip(batch.context_len.tolist(), rows, strict=True))
        return StepSize(seqs, len(batch.logit_rows), self._kv_bytes)

    def _run(self, stage_seconds: Sequence[float]) -> float:
        """Run a launch through the stages, and return the time of its end."""
        self._free = self._free or [0.0] * len(stage_seconds)
        end = self._clock.now
        for stage, seconds in enumerate(stage_seconds):
            end = self._free[stage] = max(end, self._free[stage]) + seconds
        return end

    def _sample(self, ops: Sequence[LogitOp], step: StepSize) -> list[LogitOpResult]:
        # Without drafts a step has as many logit rows as ops.
        if step.logit_rows == len(ops):
            return [_PLAIN] * len(ops)
        return [
            self._accept(op.draft) if isinstance(op, SampleOp) and op.draft.tokens else _PLAIN
            for op in ops
        ]

    def _accept(self, draft: DraftTree) -> SampleResult:
        """Accept the first draft tokens of a chain."""
        length = len(draft.tokens)
        rejected = self._rng.random(length) >= self._acceptance
        accepted = int(rejected.argmax()) if rejected.any() else length
        last = TOKEN if accepted == length else OTHER_TOKEN
        return SampleResult([TOKEN] * accepted + [last], list(range(accepted)), [])

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        """Ignored."""

    def host_blocks(self, num_bytes: int) -> None:
        """Returns None: no host memory takes evicted blocks."""

    def expert_loads(self) -> NDArray[np.int64]:
        return expert_table([])

    def close(self) -> None:
        """Ignored."""
