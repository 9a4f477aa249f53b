"""Use of the machine by the engines that `headrace top` watches."""

from pathlib import Path
from typing import get_args

from headrace.backend_traits import BACKENDS, KvDtype
from headrace.cli.engine_records import Record
from headrace.errors import HeadraceError
from headrace.measure.use_meter import open_meter
from headrace.planner.utilisation import RecentSteps, StepUse, UseMeter
from headrace.stats import STEP_KINDS


class UseReader:
    """Reads records of engines, whose models it opens without their weights."""

    def __init__(self) -> None:
        self._meters: dict[tuple[int, float], UseMeter | None] = {}
        """By process and start of the engine."""
        self._recent: dict[tuple[int, float], RecentSteps] = {}

    def read(self, record: Record) -> dict[str, StepUse]:
        """Use by the steps since the last readings, or since the start, by kind.

        Empty if the machine was not measured, or the model is not here any more.
        """
        engine = record["pid"], record["started"]
        if engine not in self._meters:
            self._meters[engine] = _meter(record)
            self._recent[engine] = RecentSteps()
        totals = {kind: getattr(record["stats"], kind) for kind in STEP_KINDS}
        steps = self._recent[engine].update(record["time"], totals)
        meter = self._meters[engine]
        found = {kind: meter.of(total) for kind, total in steps.items()} if meter else {}
        return {kind: use for kind, use in found.items() if use}


def _meter(record: Record) -> UseMeter | None:
    config, path = record["config"], record["path"]
    dtype: KvDtype | None = next(
        (name for name in get_args(KvDtype) if name == config.get("kv_dtype")), None
    )
    backend, threads = config.get("backend"), config.get("threads")
    if not path or dtype is None or backend not in BACKENDS or not isinstance(threads, int):
        return None
    modes = config.get("modes")
    try:
        return open_meter(
            Path(path), backend, threads, dtype, modes if isinstance(modes, dict) else {}
        )
    except (HeadraceError, OSError):
        return None
