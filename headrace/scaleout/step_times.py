"""What the steps of a replica take, learnt from its reports: they say of the last step how many
rows it had and how long it took.
"""

from headrace.remote import frames
from headrace.scaleout.policy import StepCost

_MEMORY = 0.95
"""Weight of what was learnt before, for each step that is heard of."""
_CHUNK = 512
_FIRST = StepCost(step_seconds=0.02, row_seconds=0.001, sequence_seconds=0.001)
"""Before there has been a step."""
_LEAST_STEP, _LEAST_ROW = 0.2, 0.01
"""Shares of the mean step that reading the weights, and a row, take at least: a line through few
steps may say anything.
"""


class StepTimes:
    """Seconds of a step over its rows, as a line: least squares over the last steps. A row of a
    prompt and one that decodes are alike.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of the weights, rows, seconds, rows x rows, rows x seconds
        self._last = -1.0

    def observe(self, report: frames.Report) -> None:
        """Take what a report says, if there has been a step since the last one."""
        figures = report.figures
        steps, rows, seconds = (
            figures.get("steps", 0.0),
            figures.get("rows_last", 0.0),
            figures.get("step_seconds", 0.0),
        )
        if steps == self._last or not rows or seconds <= 0:
            return
        self._last = steps
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_MEMORY * old + one for old, one in zip(self._sums, new, strict=True)]

    def cost(self, max_num_seqs: int, common: "StepTimes") -> StepCost:
        """What a step takes. `common`: of all replicas together, which count as much as all that is
        known of this one, so that what chance does to a few steps of one does not look like another
        machine.
        """
        weight, *sums = [own + of_all for own, of_all in zip(self._sums, common._sums, strict=True)]
        if not weight:
            return StepCost(
                _FIRST.step_seconds,
                _FIRST.row_seconds,
                _FIRST.sequence_seconds,
                _CHUNK,
                max_num_seqs,
            )
        rows, seconds, squares, products = (one / weight for one in sums)
        spread = squares - rows * rows
        slope = (products - rows * seconds) / spread if spread > 1e-6 * squares else 0.0
        row = min(max(slope, _LEAST_ROW * seconds / rows), (1 - _LEAST_STEP) * seconds / rows)
        return StepCost(seconds - row * rows, row, row, _CHUNK, max_num_seqs)
