"""Records the runs of an engine's executable, the engine's own time around them, and the processor
time of other programs.
"""

import os
from collections.abc import Callable
from operator import sub
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from headrace.async_llm import AsyncLLM
from headrace.batch import Ints, RaggedBatch
from headrace.program.op import StepSize
from headrace.simulator.executable import StepCosts


class Run(NamedTuple):
    """A run of the executable."""

    seconds: float
    context: Ints  # [B] tokens
    row_start: Ints  # [B + 1]
    logit_rows: int

    def size(self, kv_bytes: float) -> StepSize:
        ends = self.row_start.tolist()
        rows = map(sub, ends[1:], ends)
        seqs = zip(self.context.tolist(), rows, strict=True)
        return StepSize(tuple(seqs), self.logit_rows, kv_bytes)


class EngineRecord:
    """All that an engine does from now on; times are seconds."""

    def __init__(self, llm: AsyncLLM) -> None:
        engine: Any = llm._thread._engine
        executable: Any = engine._loop.executable
        run, step, add = executable.run, engine.step, engine.add
        self._busy_since: float | None = None
        self.clear()

        def timed_run(batch: RaggedBatch, tokens: Ints) -> None:
            begin = perf_counter()
            run(batch, tokens)
            seconds = perf_counter() - begin
            size = batch.context_len.copy(), batch.row_start.copy(), len(batch.logit_rows)
            self.runs.append(Run(seconds, *size))

        def timed_step(should_stop: Callable[[], bool]) -> Any:
            updates = step(should_stop)
            self.num_steps += 1
            if not engine.has_work and self._busy_since is not None:
                self.busy += perf_counter() - self._busy_since
                self._busy_since = None
            return updates

        def timed_add(*args: Any, **options: Any) -> Any:
            self.num_requests += 1
            self._busy_since = self._busy_since or perf_counter()
            return add(*args, **options)

        executable.run, engine.step, engine.add = timed_run, timed_step, timed_add

    def clear(self) -> None:
        """Forget all. Only while the engine is idle."""
        self.runs: list[Run] = []
        self.num_steps = self.num_requests = 0
        self.busy = 0.0
        """From the first request of each busy time to the end of its last step."""

    @property
    def in_runs(self) -> float:
        return sum(run.seconds for run in self.runs)

    def factors(self, costs: StepCosts, kv_bytes: float) -> "Factors":
        """Measured over predicted seconds."""
        sizes = [run.size(kv_bytes) for run in self.runs]
        runs = sum(sum(costs.stage_seconds(size)) for size in sizes)
        around = sum(map(costs.host_seconds, sizes))
        around += self.num_steps * costs.schedule_seconds
        around += self.num_requests * costs.request_seconds
        return Factors(self.in_runs / runs, (self.busy - self.in_runs) / around)


class Factors(NamedTuple):
    """Measured over predicted seconds of a trace."""

    runs: float
    """Of the executable."""
    around: float
    """Of the engine around them."""


class ScaledCosts:
    """Predicted times, each multiplied by its factor."""

    def __init__(self, costs: StepCosts, factors: Factors) -> None:
        self._costs, self._factors = costs, factors
        self.request_seconds = factors.around * costs.request_seconds
        self.schedule_seconds = factors.around * costs.schedule_seconds

    def stage_seconds(self, step: StepSize) -> list[float]:
        return [self._factors.runs * seconds for seconds in self._costs.stage_seconds(step)]

    def host_seconds(self, step: StepSize) -> float:
        return self._factors.around * self._costs.host_seconds(step)


class OtherPrograms:
    """Processors in use by other programs since this object was made, on Linux."""

    def __init__(self) -> None:
        self._begin, self._started = _others(), perf_counter()

    def processors(self) -> tuple[float, float]:
        """Processors in use by programs here, and by other virtual machines."""
        seconds = perf_counter() - self._started
        here, elsewhere = map(sub, _others(), self._begin)
        return here / seconds, elsewhere / seconds


def _others() -> tuple[float, float]:
    """Processor seconds of other programs, and those that other virtual machines took."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    tick = os.sysconf("SC_CLK_TCK")
    own = os.times()
    return (user + nice + system + irq + softirq) / tick - own.user - own.system, steal / tick
