"""Time per token against the number of sequences that decode together."""

from collections.abc import Callable
from typing import Any

from headrace.measure.plan import Plan
from headrace.planner.steps import decode_step, round_seconds
from headrace.record import frozen

_MAX_BATCH = 4096
_KNEES = 16
"""Times the knee that a curve reaches at most."""
_LEAST_POINTS = 256
"""Batch that a curve reaches, even if fewer sequences fit."""


@frozen(kw_only=True)
class BatchPoint:
    batch: int
    per_token: float
    """Seconds between two tokens of a sequence, without drafts."""
    fits: bool
    """Whether the KV of the sequences fits in memory."""

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences."""
        return self.batch / self.per_token


@frozen(kw_only=True)
class BatchCurve:
    points: tuple[BatchPoint, ...]
    knee: int | None
    """The fewest sequences whose step takes twice the time of one: before it, reading the weights
    takes most of the time. None if no batch reaches it.
    """

    def facts(self) -> dict[str, Any]:
        """The curve as JSON, in seconds and tokens/s."""
        points = [
            vars(point) | {"tokens_per_second": point.tokens_per_second} for point in self.points
        ]
        return {"points": points, "knee": self.knee}


def batch_curve(found: Plan) -> BatchCurve:
    """Predict steps of a plan's sequences, at powers of two up to those that fit, and the knee."""
    mesh, depth = found.place.mesh, found.workload.depth

    def seconds(batch: int) -> float:
        step = decode_step(depth, batch, found.kv_bytes, pipeline=mesh.pipeline)
        return round_seconds(found.timer.stage_seconds(step), batch)

    knee = _first_above(seconds, 2 * seconds(1))
    most = min(_MAX_BATCH, max(_LEAST_POINTS, found.fit.sequences))
    if knee:
        most = min(most, _KNEES * knee)
    batches = [1 << power for power in range(most.bit_length())]
    others = {found.workload.batch, *([knee] if knee else [])}
    # The last batch that fits is a point, so that pictures show where memory ends.
    others |= {found.fit.sequences} if found.fit.sequences < most else set()
    points = sorted({*batches, *others})
    return BatchCurve(
        points=tuple(
            BatchPoint(batch=batch, per_token=seconds(batch), fits=batch <= found.fit.sequences)
            for batch in points
        ),
        knee=knee,
    )


def _first_above(seconds: Callable[[int], float], limit: float) -> int | None:
    """The least batch whose rising time reaches a limit."""
    low, high = 1, 2
    while seconds(high) < limit:
        low, high = high, 2 * high
        if high > _MAX_BATCH:
            return None
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seconds(middle) >= limit else (middle, high)
    return high
