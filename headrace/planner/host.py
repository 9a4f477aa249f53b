"""Cores and memory of this process, within its cgroups."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace.planner.fit import RUNTIME_BYTES

_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")


def cpu_name(root: Path = Path("/")) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def kernels_checksum() -> int:
    """Checksum of the native module: another build may have other speeds, and round otherwise."""
    import zlib

    from headrace import _native

    return zlib.crc32(Path(_native.__file__).read_bytes())


def usable_processors() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that affinity and cgroups allow.

    Logical processors of a core count once, since they share its multipliers.
    """
    topology = root / "sys/devices/system/cpu"
    cores = len(
        {
            _text(topology / f"cpu{cpu}/topology/thread_siblings_list") or cpu
            for cpu in usable_processors()
        }
    )
    for group in _cgroups(root, "cpu"):
        # cgroups v2 have "max 100000" or "150000 100000" in one file, v1 two files.
        quota, _, period = _text(group / "cpu.max").partition(" ")
        quota = quota or _text(group / "cpu.cfs_quota_us")
        period = period or _text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def numa_nodes(root: Path = Path("/")) -> dict[int, int]:
    """Logical processors of each node; empty if unknown."""
    usable = usable_processors()
    lists = {
        path: _text(path / "cpulist")
        for path in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    counts = {int(path.name[4:]): len(usable & _numbers(text)) for path, text in lists.items()}
    return {node: count for node, count in sorted(counts.items()) if count}


def available_memory(root: Path = Path("/")) -> int:
    """Bytes for models and the engine (`RUNTIME_BYTES`), without swapping.

    Cgroups and the address space limit it. The process's own memory counts as available up to
    `RUNTIME_BYTES`, so that imports do not change the result.
    """
    status = _fields(root / "proc/self/status")
    available = _fields(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    if not available and hasattr(os, "sysconf"):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group in _cgroups(root, "memory"):
        limit = min(
            (int(text) for name in _LIMITS if (text := _text(group / name)).isdigit()), default=None
        )
        used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
        if limit is not None and used.isdigit():
            stat = _fields(group / "memory.stat")
            # In v1 the names with `total` include child groups, as its usage does.
            reclaimable = sum(
                stat.get(f"total_{name}", stat.get(name, 0))
                for name in ("active_file", "inactive_file")
            )
            available = min(available, limit - int(used) + reclaimable)
    if (address_space := _address_space(root)) is not None:
        available = min(available, address_space - status.get("VmSize:", 0) * 1024)
    return max(0, available + min(RUNTIME_BYTES, status.get("RssAnon:", 0) * 1024))


def peak_memory(root: Path = Path("/")) -> int:
    """Peak bytes in memory, including mapped files; 0 if unknown."""
    return _fields(root / "proc/self/status").get("VmHWM:", 0) * 1024


def release_free_memory() -> None:
    """Give memory that the allocator keeps for later back to the system, where it can (glibc)."""
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_memory(root: Path = Path("/")) -> int:
    """Bytes in memory now, including mapped files; 0 if unknown."""
    return _fields(root / "proc/self/status").get("VmRSS:", 0) * 1024


def reset_peak_memory(root: Path = Path("/")) -> bool:
    """Reset `peak_memory`; False if the system refuses."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def huge_pages(root: Path = Path("/")) -> str:
    """`always`, `madvise`, `never`, or `unknown`."""
    _, _, after_bracket = _text(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")
    return after_bracket.partition("]")[0] or "unknown"


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.strip("/")
        while True:
            yield group
            if group == top:
                break
            group = group.parent


def _address_space(root: Path) -> int | None:
    for line in _text(root / "proc/self/limits").splitlines():
        if line.startswith("Max address space") and (soft := line.split()[3]).isdigit():
            return int(soft)
    return None


def _numbers(text: str) -> set[int]:
    ends = [tuple(map(int, part.split("-"))) for part in text.split(",") if part]
    return {number for first, *last in ends for number in range(first, (last or [first])[0] + 1)}


def _fields(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
