import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.planner import host
from headrace.planner.fit import RUNTIME_BYTES


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
class TestUsableCores:
    def test_affinity_alone(self, tmp_path: Path) -> None:
        assert host.usable_cores(tmp_path) == 16

    @pytest.mark.parametrize(
        ("quota", "cores"),
        [
            ("max 100000", 16),
            ("400000 100000", 4),
            ("250000 100000", 2),
            ("50000 100000", 1),
            ("9900000 100000", 16),
        ],
    )
    def test_quota_of_cgroup_v2(self, tmp_path: Path, quota: str, cores: int) -> None:
        write(
            tmp_path, {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": quota}
        )
        assert host.usable_cores(tmp_path) == cores

    def test_lowest_quota_of_all_cgroups_counts(self, tmp_path: Path) -> None:
        top = "sys/fs/cgroup/"
        files = {
            "cpu.max": "1000000 100000",
            "pod/cpu.max": "300000 100000",
            "pod/box/cpu.max": "max 100000",
        }
        write(
            tmp_path,
            {"proc/self/cgroup": "0::/pod/box\n"}
            | {top + name: text for name, text in files.items()},
        )
        assert host.usable_cores(tmp_path) == 3

    def test_quota_of_cgroup_v1(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup/cpu/box/"
        files = {group + "cpu.cfs_quota_us": "200000", group + "cpu.cfs_period_us": "100000"}
        write(tmp_path, {"proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n"} | files)
        assert host.usable_cores(tmp_path) == 2

    def test_no_quota_in_cgroup_v1(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup/cpu/"
        files = {group + "cpu.cfs_quota_us": "-1", group + "cpu.cfs_period_us": "100000"}
        write(tmp_path, {"proc/self/cgroup": "3:cpu:/\n"} | files)
        assert host.usable_cores(tmp_path) == 16

    def test_threads_of_a_core_count_once(self, tmp_path: Path) -> None:
        topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        # Six cores of two threads each, and four of one, as on processors with cores of two kinds.
        siblings = {
            cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if cpu < 12 else str(cpu) for cpu in range(16)
        }
        write(tmp_path, {topology.format(cpu): text + "\n" for cpu, text in siblings.items()})
        assert host.usable_cores(tmp_path) == 10
        write(
            tmp_path,
            {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "800000 100000"},
        )
        assert host.usable_cores(tmp_path) == 8

    def test_numa_nodes(self, tmp_path: Path) -> None:
        assert host.numa_nodes(tmp_path) == {}
        lists = {
            0: "0-3,8",
            1: "4-7,9-15,24-31",
            2: "",
            3: "40-47",
        }  # node 2 has only memory; this process may not run near node 3
        write(
            tmp_path,
            {
                f"sys/devices/system/node/node{node}/cpulist": text + "\n"
                for node, text in lists.items()
            },
        )
        assert host.numa_nodes(tmp_path) == {0: 5, 1: 11}


MEMINFO = {"proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n"}


class TestAvailableMemory:
    def test_meminfo_alone(self, tmp_path: Path) -> None:
        assert host.available_memory(write(tmp_path, MEMINFO)) == 8_000_000 * 1024

    def test_no_meminfo(self, tmp_path: Path) -> None:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert host.available_memory(tmp_path) == whole
        limits = "Max address space         700000000            unlimited            bytes     \n"
        assert host.available_memory(write(tmp_path, {"proc/self/limits": limits})) == min(
            whole, 700_000_000
        )

    def test_cgroups_of_all_lines_count(self, tmp_path: Path) -> None:
        limit = {"memory.max": "3000000", "memory.current": "1000000"}
        old = {"memory.limit_in_bytes": "2000000", "memory.usage_in_bytes": "500000"}
        files = {f"sys/fs/cgroup/X:1/a::b/{name}": text for name, text in limit.items()}
        files |= {f"sys/fs/cgroup/memory/box/{name}": text for name, text in old.items()}
        write(tmp_path, MEMINFO | files | {"proc/self/cgroup": "0::/X:1/a::b\n"})
        assert host.available_memory(tmp_path) == 2_000_000
        write(tmp_path, {"proc/self/cgroup": "0::/X:1/a::b\n4:memory:/box\n"})
        assert host.available_memory(tmp_path) == 1_500_000

    def test_limit_less_use_plus_page_cache(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup/box/"
        files = {
            "memory.max": "1000000",
            "memory.current": "700000",
            "memory.stat": "anon 500000\nactive_file 50000\ninactive_file 100000\n",
        }
        write(
            tmp_path,
            MEMINFO
            | {"proc/self/cgroup": "0::/box\n"}
            | {group + name: text for name, text in files.items()},
        )
        assert host.available_memory(tmp_path) == 450_000

    def test_limit_of_cgroup_v1(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup/memory/"
        files = {
            group + "memory.limit_in_bytes": "1000000",
            group + "memory.usage_in_bytes": "900000",
        }
        write(tmp_path, MEMINFO | {"proc/self/cgroup": "4:memory:/\n"} | files)
        assert host.available_memory(tmp_path) == 100_000

    def test_cgroup_v1_counts_child_groups(self, tmp_path: Path) -> None:
        group, stat = (
            "sys/fs/cgroup/memory/box/",
            "inactive_file 1\ntotal_inactive_file 150000\ntotal_active_file 50000\n",
        )
        files = {
            "memory.limit_in_bytes": "1000000",
            "memory.usage_in_bytes": "900000",
            "memory.stat": stat,
        }
        write(
            tmp_path,
            MEMINFO
            | {"proc/self/cgroup": "4:memory:/box\n"}
            | {group + name: text for name, text in files.items()},
        )
        assert host.available_memory(tmp_path) == 300_000

    def test_lowest_cgroup_limit_counts(self, tmp_path: Path) -> None:
        limits = {
            "": ("memory.max", "900000"),
            "pod/": ("memory.high", "500000"),
            "pod/box/": ("memory.max", "max"),
        }
        files = {f"sys/fs/cgroup/{group}{name}": limit for group, (name, limit) in limits.items()}
        files |= {f"sys/fs/cgroup/{group}memory.current": "100000" for group in limits}
        write(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/pod/box\n"} | files)
        assert host.available_memory(tmp_path) == 400_000

    def test_address_space_limit(self, tmp_path: Path) -> None:
        limits = "Limit                     Soft Limit           Hard Limit           Units     \n"
        limits += "Max address space         700000000            unlimited            bytes     \n"
        files = {"proc/self/limits": limits, "proc/self/status": "VmSize:\t  100000 kB\n"}
        assert (
            host.available_memory(write(tmp_path, MEMINFO | files)) == 700_000_000 - 100_000 * 1024
        )

    def test_imports_so_far_do_not_count(self, tmp_path: Path) -> None:
        """`headrace show` imports little and `headrace run` much, and both must say the same."""
        group = "sys/fs/cgroup/"
        sizes = []
        for own in (20_000, 60_000):
            files = {
                group + "memory.max": "400000000",
                group + "memory.current": f"{own * 1024}",
                "proc/self/cgroup": "0::/\n",
            }
            sizes.append(
                host.available_memory(
                    write(tmp_path, MEMINFO | files | {"proc/self/status": f"RssAnon:\t{own} kB\n"})
                )
            )
        assert sizes == [400_000_000] * 2
        assert (
            host.available_memory(write(tmp_path, {"proc/self/status": "RssAnon:\t9000000 kB\n"}))
            == 400_000_000 - 60_000 * 1024 + RUNTIME_BYTES
        )

    def test_usage_beyond_the_limit_leaves_zero(self, tmp_path: Path) -> None:
        group = "sys/fs/cgroup/"
        files = {group + "memory.max": "1000", group + "memory.current": "2000"}
        assert (
            host.available_memory(write(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/\n"} | files))
            == 0
        )


def test_cpu_name(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"proc/cpuinfo": "processor\t: 0\nmodel name\t: EPYC: 9R14 \nmodel name\t: another\n"},
    )
    assert host.cpu_name(tmp_path) == "EPYC: 9R14"
    assert host.cpu_name(tmp_path / "elsewhere") == (platform.processor() or platform.machine())


def test_huge_pages(tmp_path: Path) -> None:
    assert host.huge_pages(tmp_path) == "unknown"
    assert (
        host.huge_pages(
            write(
                tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"}
            )
        )
        == "madvise"
    )


def test_facts_of_this_host() -> None:
    assert host.usable_cores() >= 1
    assert host.available_memory() > 0
    assert host.cpu_name()
    assert host.huge_pages() in ("always", "madvise", "never", "unknown")


ALLOCATE = """
from headrace.planner import host
peaks = [host.peak_memory()]
memory = bytearray(64 << 20)
memory[::4096] = b"x" * len(memory[::4096])
peaks.append(host.peak_memory())
del memory
forgot = host.reset_peak_memory()
print(*peaks, host.peak_memory(), forgot)
"""


class TestPeakMemory:
    def test_peak_memory_and_its_reset(self) -> None:
        # A process of its own: this one may have had more in memory before, and may not be able to
        # forget that.
        child = subprocess.run(
            [sys.executable, "-c", ALLOCATE], capture_output=True, text=True, check=True
        )
        *figures, forgot = child.stdout.split()
        before, full, after = map(int, figures)
        assert full - before > 48 << 20
        assert (full - after > 48 << 20) == (forgot == "True")

    def test_reset_writes_clear_refs(self, tmp_path: Path) -> None:
        assert host.reset_peak_memory(write(tmp_path, {"proc/self/clear_refs": ""}))
        assert (tmp_path / "proc/self/clear_refs").read_text() == "5"  # see proc(5)

    def test_unknown_peak_memory(self, tmp_path: Path) -> None:
        assert not host.reset_peak_memory(tmp_path)
        assert host.peak_memory(tmp_path) == 0
        assert (
            host.peak_memory(
                write(tmp_path, {"proc/self/status": "Name:\tx\nVmHWM:\t     12 kB\n"})
            )
            == 12 << 10
        )
