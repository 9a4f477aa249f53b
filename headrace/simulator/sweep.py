"""Runs a trace at rising loads: the curve of latency against throughput, and its knee."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from headrace.errors import RequestError
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.record import frozen
from headrace.simulator.report import Report, report_facts
from headrace.simulator.simulate import Deployment
from headrace.simulator.trace import Trace, at_rate

LOADS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
"""Shares of the rate at which a deployment ends a trace whose conversations start together."""


@frozen
class SweepPoint:
    rate: float
    """Conversations that start per second."""
    report: Report

    @property
    def power(self) -> float:
        """Throughput over mean latency (Kleinrock 1979)."""
        latency = self.report.latencies.total.mean
        return self.report.output_tokens_per_second / latency if latency else 0.0


@frozen
class Sweep:
    points: tuple[SweepPoint, ...]
    """By rising rate."""

    @property
    def knee(self) -> SweepPoint:
        """The point of the most throughput for its latency."""
        return max(self.points, key=lambda point: point.power)


def sweep(
    deployment: Deployment,
    trace: Trace,
    loads: Sequence[float] = LOADS,
    on_progress: ProgressCallback = ignore_progress,
) -> Sweep:
    """Simulate a trace with its arrivals drawn together and apart.

    Raises RequestError if all its requests are refused.
    """
    step = f"simulating {len(loads) + 1} loads"
    on_progress(step, 0.0)
    together = deployment.run(at_rate(trace, inf))
    if not together.requests:
        raise RequestError(f"every request of the trace is refused: {together.refusal}")
    capacity = len(trace) / together.seconds
    points: list[SweepPoint] = []
    for number, load in enumerate(loads, 1):
        on_progress(step, number / (len(loads) + 1))
        rate = load * capacity
        points.append(SweepPoint(rate, deployment.run(at_rate(trace, rate))))
    on_progress(step, 1.0)
    return Sweep(tuple(points))


def sweep_facts(found: Sweep) -> Mapping[str, Any]:
    """A sweep as JSON."""
    return {
        "knee": found.knee.rate,
        "points": [{"rate": point.rate, **report_facts(point.report)} for point in found.points],
    }
