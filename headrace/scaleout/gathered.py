"""What the replicas of a fleet say of themselves, as if they were one engine."""

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from headrace.remote import frames
from headrace.remote.replica_status import ReplicaStatus

_OF_ALL = ("max_num_seqs", "kv_tokens", "kv_bytes", "weight_bytes", "threads")
"""What the replicas have together, of what they say at their start."""
_COUNTED = (
    *(
        "steps",
        "rows",
        "tokens",
        "drafted",
        "accepted",
        "forced",
        "proposer_failures",
        "failed_steps",
        "preemptions",
        "prompt_tokens",
    ),
    *("cached_tokens", "offloaded_blocks", "restored_blocks", "finished", "aborted", "refused"),
)
"""Figures that only grow, also when a replica goes."""
_LONGEST = ("step_seconds",)
_SHARES = ("occupancy", "waste")
"""Of the KV memory: the mean of the replicas, by how much of it they have."""


def hello_of(replicas: Collection[ReplicaStatus]) -> frames.EngineInfo:
    """What one engine as large as all of these would say of itself; there is one of them at
    least.
    """
    hellos = [replica.info for replica in replicas]
    first, *_ = hellos
    sums = {name: sum(getattr(hello, name) for hello in hellos) for name in _OF_ALL}
    return msgspec.structs.replace(
        first, max_model_len=min(hello.max_model_len for hello in hellos), **sums
    )


def adapters_of(replicas: Collection[ReplicaStatus]) -> dict[str, str]:
    """The adapters that all of these have."""
    first, *others = [replica.adapters for replica in replicas] or [{}]
    return {name: path for name, path in first.items() if all(name in other for other in others)}


def blocks_of(maps: Mapping[str, frames.Blocks]) -> frames.Blocks:
    """The blocks of all replicas: groups of layers one after the other, in which the name of its
    replica precedes that of a request.
    """
    groups = [
        msgspec.structs.replace(
            group,
            holdings=[
                msgspec.structs.replace(one, request=f"{replica}/{one.request}")
                for one in group.holdings
            ],
        )
        for replica, blocks in maps.items()
        for group in blocks.groups
    ]
    return frames.Blocks("", next((blocks.block_size for blocks in maps.values()), 0), groups)


class Totals:
    """The reports of all replicas together, those that are gone included in what is counted."""

    def __init__(self) -> None:
        self._last: dict[str, frames.Report] = {}
        """By boot_id."""

    def report(self, replicas: Collection[ReplicaStatus]) -> frames.Report:
        """As one engine would report it."""
        self._last |= {replica.boot_id: replica.report for replica in replicas}
        present = {replica.boot_id for replica in replicas}
        figures, adapters, drafts = Counter[str](), Counter[str](), dict[str, list[float]]()
        for boot_id, report in self._last.items():
            here = boot_id in present
            figures.update(
                {name: value for name, value in report.figures.items() if here or name in _COUNTED}
            )
            adapters.update(report.adapters if here else {})
            for name, numbers in report.drafts.items():
                drafts[name] = [
                    a + b
                    for a, b in zip(drafts.get(name, [0.0] * len(numbers)), numbers, strict=True)
                ]
        merged = dict[str, float](figures)
        reports = [self._last[boot_id].figures for boot_id in present]
        for name in _LONGEST:
            merged[name] = max((one.get(name, 0.0) for one in reports), default=0.0)
        whole = sum(one.get("kv_bytes", 0.0) for one in reports)
        for name in _SHARES:
            merged[name] = (
                sum(one.get(name, 0.0) * one.get("kv_bytes", 0.0) for one in reports) / whole
                if whole
                else 0.0
            )
        return frames.Report(merged, dict(adapters), drafts)
