"""Which experts the rows of a phase went to, beside what is to be expected where every row is as
likely to go to any of them.
"""

from collections.abc import Sequence
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from headrace.planner.profile import Phase
from headrace.program.moe import Experts
from headrace.program.trace import Program
from headrace.record import frozen

Loads = NDArray[np.int64]
"""Rows that went to each expert, [ops over experts, experts]."""


@frozen
class ExpertProfile:
    """The routing of a phase."""

    phase: str
    num_experts: int
    loads: Loads
    """Of all steps together."""
    expected: float
    """Experts that the rows of a step go to, in the mean over steps and ops: what the costs of the
    ops say.
    """
    measured: float
    """The same as it was counted."""

    @property
    def even(self) -> float:
        """Rows that each expert would have if all had as many."""
        return float(self.loads.mean())

    @property
    def most(self) -> float:
        """Rows of the busiest expert of any op, in times of the even share."""
        return float(self.loads.max()) / self.even

    @property
    def least(self) -> float:
        """Rows of the least busy expert of any op, in times of the even share."""
        return float(self.loads.min()) / self.even


def expert_profile(phase: Phase, program: Program, steps: Sequence[Loads]) -> ExpertProfile:
    """The routing of a phase of a program with experts, from the rows that went to each of them in
    each step.
    """
    ops = [op for op in program.ops if isinstance(op, Experts)]
    expected = mean(op.distinct_experts(op.x.num_rows(step)) for step in phase.steps for op in ops)
    measured = mean(float(np.count_nonzero(loads, axis=1).mean()) for loads in steps)
    return ExpertProfile(
        phase.name, max(len(op.gate) for op in ops), np.sum(steps, axis=0), expected, measured
    )
