"""What the steps of a replica take, learnt from its reports: they say of the last step how many rows it had and how long it took."""

from headrace.scaleout.policy import StepCost
from headrace.server import frames

_RATE = 0.2
"""Share of a new figure in a mean."""
_CHUNK = 512
_FIRST = StepCost(step_seconds=0.02, row_seconds=0.001)
"""Before there has been a step."""


class StepTimes:
    """Running means of a step with next to no prompt rows in it, and of what a prompt row takes beyond that."""

    def __init__(self) -> None:
        self._step: float | None = None
        self._row: float | None = None
        self._last = -1.0

    def observe(self, report: frames.Report) -> None:
        """Take what a report says, if there has been a step since the last one."""
        figures = report.figures
        steps, rows, seconds = figures.get("steps", 0.0), figures.get("rows_last", 0.0), figures.get("step_seconds", 0.0)
        if steps == self._last or not rows or seconds <= 0:
            return
        self._last = steps
        more = rows - max(figures.get("running", 0.0), 1.0)
        if more <= 1:
            self._step = seconds if self._step is None else self._step + _RATE * (seconds - self._step)
        elif more >= 8:
            row = max(0.0, seconds - (self._step or 0.0)) / rows
            self._row = row if self._row is None else self._row + _RATE * (row - self._row)

    def cost(self, max_num_seqs: int) -> StepCost:
        """What a step takes."""
        step = _FIRST.step_seconds if self._step is None else self._step
        row = min(_FIRST.row_seconds, step / 4) if self._row is None else self._row
        return StepCost(step, row, chunk=_CHUNK, max_num_seqs=max_num_seqs)
