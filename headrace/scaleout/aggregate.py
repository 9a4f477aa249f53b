"""Properties and statistics of a fleet as if it were one engine."""

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from headrace.remote import frames
from headrace.remote.replica_status import ReplicaStatus
from headrace.stats import STEP_KINDS, StepTotals

_SUMMED_INFO = (
    *("max_num_seqs", "kv_tokens", "kv_bytes", "weight_bytes", "threads"),
    *("memory", "runtime"),
)
_COUNTERS = (
    "steps",
    "rows",
    "tokens",
    "drafted",
    "accepted",
    "certain",
    "proposer_failures",
    "failed_steps",
    "preemptions",
    "prompt_tokens",
    "cached_tokens",
    "offloaded_blocks",
    "restored_blocks",
    *("disk_saved_blocks", "disk_loaded_blocks", "disk_dropped_blocks"),
    "finished",
    "aborted",
    "refused",
    *("learning.tokens", "learning.swaps", "learning.rollbacks"),
    *(f"{kind}.{field}" for kind in STEP_KINDS for field in StepTotals._fields),
)
_MAXIMA = ("step_seconds", "kv_disk_bytes")
_KV_SHARES = ("occupancy", "waste")


def combine_info(replicas: Collection[ReplicaStatus]) -> frames.EngineInfo:
    infos = [replica.info for replica in replicas]
    sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMMED_INFO}
    max_model_len = min(info.max_model_len for info in infos)
    return msgspec.structs.replace(infos[0], max_model_len=max_model_len, **sums)


def combine_blocks(maps: Mapping[str, frames.Blocks]) -> frames.Blocks:
    """Concatenate the KV groups; requests are named REPLICA/REQUEST."""
    groups = [
        msgspec.structs.replace(
            group,
            holdings=[
                msgspec.structs.replace(holding, request=f"{replica}/{holding.request}")
                for holding in group.holdings
            ],
        )
        for replica, blocks in maps.items()
        for group in blocks.groups
    ]
    return frames.Blocks("", next((blocks.block_size for blocks in maps.values()), 0), groups)


class ReportTotals:
    def __init__(self) -> None:
        self._last_reports: dict[str, frames.Report] = {}

    def report(self, replicas: Collection[ReplicaStatus]) -> frames.Report:
        self._last_reports |= {replica.boot_id: replica.report for replica in replicas}
        present = {replica.boot_id for replica in replicas}
        sums, adapters, drafts = Counter[str](), Counter[str](), dict[str, list[float]]()
        for boot_id, report in self._last_reports.items():
            is_present = boot_id in present
            sums.update(
                {
                    name: value
                    for name, value in report.figures.items()
                    if is_present or name in _COUNTERS
                }
            )
            adapters.update(report.adapters if is_present else {})
            for name, counts in report.drafts.items():
                total = drafts.get(name, [0.0] * len(counts))
                drafts[name] = [a + b for a, b in zip(total, counts, strict=True)]

        figures = dict[str, float](sums)
        reports = [self._last_reports[boot_id].figures for boot_id in present]
        for name in _MAXIMA:
            figures[name] = max((report.get(name, 0.0) for report in reports), default=0.0)
        total_bytes = sum(report.get("kv_bytes", 0.0) for report in reports)
        for name in _KV_SHARES:
            used = sum(report.get(name, 0.0) * report.get("kv_bytes", 0.0) for report in reports)
            figures[name] = used / total_bytes if total_bytes else 0.0
        return frames.Report(figures, dict(adapters), drafts)
