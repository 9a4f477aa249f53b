"""Rows of each expert, next to the expectation for uniform routing."""

from collections.abc import Sequence
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from headrace.measure.op_profile import Phase
from headrace.program.moe import Experts
from headrace.program.trace import Program
from headrace.record import frozen

ExpertLoads = NDArray[np.int64]
"""Rows of each expert, [ops over experts, experts]."""


@frozen(kw_only=True)
class ExpertProfile:
    phase: str
    num_experts: int
    loads: ExpertLoads
    expected: float
    """Mean distinct experts in a step if routing is uniform."""
    measured: float
    """Mean distinct experts in a step."""

    @property
    def mean_load(self) -> float:
        return float(self.loads.mean())

    @property
    def max_load(self) -> float:
        """In multiples of the mean."""
        return float(self.loads.max()) / self.mean_load

    @property
    def min_load(self) -> float:
        """In multiples of the mean."""
        return float(self.loads.min()) / self.mean_load


def expert_profile(phase: Phase, program: Program, steps: Sequence[ExpertLoads]) -> ExpertProfile:
    ops = [op for op in program.ops if isinstance(op, Experts)]
    expected = mean(op.distinct_experts(op.x.num_rows(load)) for load in phase.steps for op in ops)
    measured = mean(float(np.count_nonzero(loads, axis=1).mean()) for loads in steps)
    return ExpertProfile(
        phase=phase.name,
        num_experts=max(len(op.gate) for op in ops),
        loads=np.sum(steps, axis=0),
        expected=expected,
        measured=measured,
    )
