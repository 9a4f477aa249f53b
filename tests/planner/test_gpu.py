"""The GPU of a made-up driver, and the obstacles to its use."""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.planner import gpu
from headrace.planner.gpu import Gpu, GpuHost

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, 132, (12, 8))
READY = GpuHost(H100, torch_cuda="12.8")
_VERSION = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC "
    "2024\nGCC version: gcc 12.2.0\n"
)


class Driver:
    """The functions of a driver's library that the planner calls."""

    def __init__(self, count: int = 1, code: int = 0) -> None:
        self.count, self.code = count, code

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 5
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: ctypes.c_int) -> int:
        uuid._obj[:] = [device.value] * 16
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = H100.name.encode()
        return device.value - 5

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:
        size._obj.value = H100.memory
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: ctypes.c_int) -> int:
        number._obj.value = {16: 132, 75: 9, 76: 0}[attribute]
        return 0


def test_gpu_of_a_driver() -> None:
    found, why = gpu.query_driver(Driver())
    assert found == H100 and not why and H100.isa == "sm_90"


class Management:
    """The functions of NVML that the planner calls."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 7
        return self.code or uuid != b"GPU-05050505-0505-0505-0505-050505050505"

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, sizes: Any) -> int:
        sizes._obj[:] = [85, 80 + (handle.value or 0), 5]
        return 0


def test_free_memory_of_a_gpu() -> None:
    """NVML finds the GPU by the UUID that the driver gives."""
    assert gpu.query_free_memory(Driver(count=2), Management(), 1) == 87
    assert gpu.query_free_memory(Driver(code=3), Management(), 1) is None
    assert gpu.query_free_memory(Driver(), Management(code=6), 1) is None
    assert gpu.query_driver(Driver(count=2))[0] == replace(H100, count=2)


def test_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for driver, message in (
        (Driver(count=0), "lists no GPU: check nvidia-smi"),
        (Driver(code=803), "lists no GPU, error 803: check"),
    ):
        found, why = gpu.query_driver(driver)
        assert found is None and message in why
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "(CUDA_VISIBLE_DEVICES is set)" in gpu.query_driver(Driver(count=0))[1]


def test_no_library_is_loaded_without_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_by_driver", lambda: pytest.fail("loaded"))
    assert gpu.find_gpu(tmp_path) == (
        None,
        "this machine has no NVIDIA driver: use the cpu backend",
    )
    assert gpu.driver_version(tmp_path) == ""


@pytest.mark.parametrize("trace", ["proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg"])
def test_files_of_a_driver(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / trace).parent.mkdir(parents=True)
    (tmp_path / trace).write_text(_VERSION)
    monkeypatch.setattr(gpu, "_by_driver", lambda: (H100, ""))
    assert gpu.find_gpu(tmp_path) == (H100, "") and gpu.find_gpu_host(tmp_path).gpu == H100
    assert gpu.driver_version(tmp_path) == ("550.54.15" if trace.startswith("proc") else "")


def test_missing_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    found, why = gpu._by_driver.__wrapped__()
    assert found is None and "--gpus all" in why


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"gpu": None, "no_gpu": "none here"}, "none here"),
        (
            {"gpu": Gpu("Tesla V100", (7, 0), 1, 80, (12, 8))},
            "Tesla V100 has compute capability 7.0, and kernels need at least 8.0: use the cpu",
        ),
        (
            {"absent": ("torch", "triton")},
            "torch and triton are not installed: pip install 'headrace[cuda]', about 3 GB",
        ),
        ({"absent": ("triton",)}, "triton is not installed: pip install"),
        (
            {"torch_cuda": None},
            "torch is a CPU build: pip uninstall torch, then pip install 'headrace[cuda]'",
        ),
        (
            {"torch_cuda": "13.0"},
            "torch is built for CUDA 13.0, and the driver supports at most 12.8: install "
            "a newer driver",
        ),
        ({"torch_cuda": "12.9"}, ""),
        ({"interprets": True}, "TRITON_INTERPRET is set"),
        (
            {"absent_tools": ("gcc", "Python.h")},
            "gcc and Python.h are missing, which Triton compiles its launcher with: "
            "apt install gcc python3-dev",
        ),
        ({"absent_tools": ("Python.h",)}, "Python.h is missing"),
        (
            {"absent_tools": ("the compiler 'icc' of CC", "Python.h")},
            "the compiler 'icc' of CC and Python.h are missing, which Triton compiles its launcher "
            "with: correct or unset CC and apt install python3-dev",
        ),
    ],
)
def test_gpu_obstacles(change: dict[str, Any], message: str) -> None:
    obstacle = GpuHost(**vars_of(READY) | change).obstacle
    assert message in obstacle and bool(message) == bool(obstacle)


def vars_of(host: GpuHost) -> dict[str, Any]:
    return {
        name: getattr(host, name)
        for name in ("gpu", "no_gpu", "absent", "torch_cuda", "interprets", "absent_tools")
    }


def test_tools_of_the_kernel_compiler(tmp_path: Path) -> None:
    """Triton takes $CC, or else gcc or clang of the path."""
    assert gpu.absent_tools({"PATH": str(tmp_path)}, str(tmp_path)) == ("gcc", "Python.h")
    (tmp_path / "Python.h").touch()
    (tmp_path / "clang").touch(mode=0o755)
    for chosen in ({}, {"CC": "clang"}, {"CC": str(tmp_path / "clang")}):
        assert gpu.absent_tools({"PATH": str(tmp_path), **chosen}, str(tmp_path)) == ()
    wrong = {"CC": "icc", "PATH": str(tmp_path)}
    assert gpu.absent_tools(wrong, str(tmp_path)) == ("the compiler 'icc' of CC",)


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'\n", "12.8"),
        ("cuda: Optional[str] = None\n", None),
        ("", None),
    ],
)
def test_cuda_version_of_torch_without_import(
    text: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "torch/version.py").write_text(
        f"__version__ = '2'\n{text}hip: Optional[str] = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    assert gpu._torch_cuda() == cuda


def test_triton_interpret_variable() -> None:
    assert gpu.interprets({"TRITON_INTERPRET": "1"}) and gpu.interprets(
        {"TRITON_INTERPRET": "True"}
    )
    assert not gpu.interprets({}) and not gpu.interprets({"TRITON_INTERPRET": "0"})
