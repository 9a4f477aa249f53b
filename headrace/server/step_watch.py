"""The engine's last steps: their use of the machine, next to the planner's prediction.

The machine is known from an earlier `headrace doctor`, `profile` or `plan`.
"""

from collections.abc import Mapping
from time import monotonic

from headrace.planner.utilisation import RecentSteps, StepUse, meter_of
from headrace.program.trace import Program
from headrace.remote.frames import EngineInfo
from headrace.stats import STEP_KINDS, StepTotals


class StepWatch:
    """Reads the totals of the engine's steps. Between two readings the engine does nothing."""

    def __init__(self, program: Program, info: EngineInfo) -> None:
        self._meter = meter_of(program, info.backend, info.threads, info.kv_dtype)
        self._recent = RecentSteps()

    def uses(self, figures: Mapping[str, float]) -> dict[str, StepUse]:
        """Use by the last seconds' steps of each kind, `decode_steps` and `prompt_steps`. Empty
        if the machine was not measured.
        """
        totals = {
            kind: StepTotals._make(figures.get(f"{kind}.{name}", 0) for name in StepTotals._fields)
            for kind in STEP_KINDS
        }
        recent = self._recent.update(monotonic(), totals)
        if self._meter is None:
            return {}
        found = {kind: self._meter.of(total) for kind, total in recent.items()}
        return {kind: use for kind, use in found.items() if use}
