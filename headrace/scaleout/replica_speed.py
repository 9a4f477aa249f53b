"""Speed of a replica, from the rows and seconds of its last steps."""

from math import inf

from headrace.errors import RequestError
from headrace.record import frozen
from headrace.remote import frames

_DECAY = 0.95
_CHUNK_SIZE = 512
_MIN_STEP_SHARE = 0.2
_MIN_ROW_SHARE = 0.01
"""Minimum share of the mean row time, since few steps may give any line."""


@frozen
class ReplicaSpeed:
    """Seconds of a step: `step_seconds` + `row_seconds` x prompt rows + `sequence_seconds` x
    decoding sequences.

    Raises RequestError for a field out of range.
    """

    step_seconds: float
    """Seconds to read all weights."""
    row_seconds: float
    sequence_seconds: float = 0.0
    """Seconds per decoding sequence for its row and context."""
    chunk_size: int = 512
    max_num_seqs: int = 64

    def __post_init__(self) -> None:
        seconds = self.step_seconds, self.row_seconds, self.sequence_seconds
        has_valid_seconds = self.step_seconds > 0 and all(0 <= value < inf for value in seconds)
        if not (has_valid_seconds and self.chunk_size >= 1 and self.max_num_seqs >= 1):
            raise RequestError(
                f"{self} is out of range; step_seconds must be positive, other seconds 0 or more, "
                "chunk_size and max_num_seqs 1 or more"
            )


DEFAULT_SPEED = ReplicaSpeed(step_seconds=0.02, row_seconds=0.001, sequence_seconds=0.001)


class SpeedEstimator:
    """Least squares fit of step seconds to rows."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, rows, seconds, rows * rows, rows * seconds
        self._last_steps = -1.0

    def observe(self, report: frames.Report) -> None:
        figures = report.figures
        steps = figures.get("steps", 0.0)
        rows = figures.get("rows_last", 0.0)
        seconds = figures.get("step_seconds", 0.0)
        if steps == self._last_steps or not rows or seconds <= 0:
            return
        self._last_steps = steps
        terms = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_DECAY * old + new for old, new in zip(self._sums, terms, strict=True)]

    def estimate(self, max_num_seqs: int, common: "SpeedEstimator") -> ReplicaSpeed:
        """Estimate the speed; `common`, of all replicas, dampens noise."""
        sums = [own + shared for own, shared in zip(self._sums, common._sums, strict=True)]
        weight = sums[0]
        if not weight:
            return ReplicaSpeed(
                step_seconds=DEFAULT_SPEED.step_seconds,
                row_seconds=DEFAULT_SPEED.row_seconds,
                sequence_seconds=DEFAULT_SPEED.sequence_seconds,
                chunk_size=_CHUNK_SIZE,
                max_num_seqs=max_num_seqs,
            )
        rows, seconds, squares, products = (total / weight for total in sums[1:])
        variance = squares - rows * rows
        slope = (products - rows * seconds) / variance if variance > 1e-6 * squares else 0.0
        min_row = _MIN_ROW_SHARE * seconds / rows
        max_row = (1 - _MIN_STEP_SHARE) * seconds / rows
        row_seconds = min(max(slope, min_row), max_row)
        return ReplicaSpeed(
            step_seconds=seconds - row_seconds * rows,
            row_seconds=row_seconds,
            sequence_seconds=row_seconds,
            chunk_size=_CHUNK_SIZE,
            max_num_seqs=max_num_seqs,
        )
