"""The GPU of this machine, found without torch or Triton."""

import os
import re
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any
from uuid import UUID

from headrace.record import frozen

MIN_CAPABILITY = (8, 0)
"""First compute capability that multiplies bf16."""
FP8_CAPABILITY = (8, 9)
"""First compute capability that converts fp8 (e4m3)."""
INSTALL = "pip install 'headrace[cuda]', about 3 GB"
_COMPILER, _HEADER = "gcc", "Python.h"
_PACKAGES = {_COMPILER: "gcc", _HEADER: "python3-dev"}
"""Debian packages."""
_DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
_LIBRARY = "libcuda.so.1"
_MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76
"""Device attributes of the CUDA driver API (`CUdevice_attribute`)."""
_MAX_NAME_BYTES = 256


@frozen
class Gpu:
    name: str
    capability: tuple[int, int]
    memory: int
    """Total bytes."""
    multiprocessors: int
    cuda: tuple[int, int]
    """Newest CUDA version that the driver supports."""
    count: int = 1
    """GPUs that the driver lists. This one is the first."""

    @property
    def without_fp8(self) -> str:
        """The reason why kernels cannot convert fp8 (e4m3), or ""."""
        if self.capability >= FP8_CAPABILITY:
            return ""
        return (
            f"{self.name} has compute capability {_version(self.capability)}, and fp8 needs "
            f"{_version(FP8_CAPABILITY)}"
        )

    @property
    def isa(self) -> str:
        """Target of the kernel compiler: `sm_90`."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@frozen
class GpuHost:
    gpu: Gpu | None = None
    no_gpu: str = ""
    absent: tuple[str, ...] = ()
    torch_cuda: str | None = None
    """None for a CPU build."""
    interprets: bool = False
    absent_tools: tuple[str, ...] = ()
    """What Triton compiles its launcher with, and this machine lacks."""

    @property
    def obstacle(self) -> str:
        """The reason why no program can run on the GPU, and the remedy; or ""."""
        if self.gpu is None:
            return self.no_gpu
        if self.gpu.capability < MIN_CAPABILITY:
            return (
                f"{self.gpu.name} has compute capability {_version(self.gpu.capability)}, and "
                f"kernels need at least {_version(MIN_CAPABILITY)}: use the cpu backend"
            )
        if self.absent:
            be = "is" if len(self.absent) == 1 else "are"
            return f"{' and '.join(self.absent)} {be} not installed: {INSTALL}"
        if self.torch_cuda is None:
            return f"torch is a CPU build: pip uninstall torch, then {INSTALL}"
        if int(self.torch_cuda.partition(".")[0]) > self.gpu.cuda[0]:
            return (
                f"torch is built for CUDA {self.torch_cuda}, and the driver supports at most "
                f"{_version(self.gpu.cuda)}: install a newer driver"
            )
        if self.absent_tools:
            be = "is" if len(self.absent_tools) == 1 else "are"
            packages = [_PACKAGES[tool] for tool in self.absent_tools if tool in _PACKAGES]
            remedies = []
            if len(packages) < len(self.absent_tools):
                remedies.append("correct or unset CC")
            if packages:
                remedies.append(f"apt install {' '.join(packages)}")
            return (
                f"{' and '.join(self.absent_tools)} {be} missing, which Triton compiles its "
                f"launcher with: {' and '.join(remedies)}"
            )
        if self.interprets:
            return "TRITON_INTERPRET is set, so kernels would be interpreted: unset it"
        return ""


def _version(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def find_gpu_host(root: Path = Path("/")) -> GpuHost:
    """Without a driver, only a few files are looked up."""
    gpu, why = find_gpu(root)
    absent = tuple(name for name in ("torch", "triton") if find_spec(name) is None)
    return GpuHost(
        gpu=gpu,
        no_gpu=why,
        absent=absent,
        torch_cuda=_torch_cuda(),
        interprets=interprets(),
        absent_tools=absent_tools() if gpu else (),
    )


def absent_tools(
    environment: "os._Environ[str] | dict[str, str]" = os.environ,
    include: str = sysconfig.get_path("include"),
) -> tuple[str, ...]:
    """Find a C compiler and Python's headers as Triton does: $CC, or else gcc or clang."""
    path, chosen = environment.get("PATH"), environment.get("CC")
    compilers = (_COMPILER, "clang") if chosen is None else (chosen,)
    has_compiler = any(which(compiler, path=path) for compiler in compilers)
    has_headers = Path(include, _HEADER).exists()
    absent = _COMPILER if chosen is None else f"the compiler '{chosen}' of CC"
    return (() if has_compiler else (absent,)) + (() if has_headers else (_HEADER,))


def interprets(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> bool:
    return environment.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def find_gpu(root: Path = Path("/")) -> tuple[Gpu | None, str]:
    if not any((root / file).exists() for file in _DRIVER_FILES):
        return None, "this machine has no NVIDIA driver: use the cpu backend"
    return _by_driver()


def driver_version(root: Path = Path("/")) -> str:
    """Empty if unknown."""
    try:
        text = (root / _DRIVER_FILES[0]).read_text()
    except OSError:
        return ""
    match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    return match[1] if match else ""


@cache
def _by_driver() -> tuple[Gpu | None, str]:
    from ctypes import CDLL

    try:
        library = CDLL(_LIBRARY)
    except OSError:
        return (
            None,
            f"the NVIDIA driver's library {_LIBRARY} is missing: give this container the GPU "
            "(--gpus all)",
        )
    return query_driver(library)


def query_driver(library: Any) -> tuple[Gpu | None, str]:
    from ctypes import byref, c_int, c_size_t, create_string_buffer

    count, device, version, memory = c_int(), c_int(), c_int(), c_size_t()
    code = library.cuInit(0) or library.cuDeviceGetCount(byref(count))
    if code or not count.value:
        hidden = " (CUDA_VISIBLE_DEVICES is set)" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        return (
            None,
            f"the NVIDIA driver lists no GPU{f', error {code}' if code else ''}{hidden}: "
            "check nvidia-smi",
        )
    name, numbers = create_string_buffer(_MAX_NAME_BYTES), []
    library.cuDeviceGet(byref(device), 0)
    library.cuDeviceGetName(name, _MAX_NAME_BYTES, device)
    library.cuDeviceTotalMem_v2(byref(memory), device)
    library.cuDriverGetVersion(byref(version))
    for attribute in (_MAJOR, _MINOR, _MULTIPROCESSORS):
        number = c_int()
        library.cuDeviceGetAttribute(byref(number), attribute, device)
        numbers.append(number.value)
    major, minor, multiprocessors = numbers
    cuda = version.value // 1000, version.value % 1000 // 10
    return Gpu(
        name=name.value.decode(errors="replace"),
        capability=(major, minor),
        memory=memory.value,
        multiprocessors=multiprocessors,
        cuda=cuda,
        count=count.value,
    ), ""


def free_memory_of(index: int) -> int | None:
    """Free bytes of a GPU, without a CUDA context on it; None if the driver does not say."""
    from ctypes import CDLL

    try:
        return query_free_memory(CDLL(_LIBRARY), CDLL(_MANAGEMENT_LIBRARY), index)
    except OSError:
        return None


def query_free_memory(driver: Any, management: Any, index: int) -> int | None:
    """Free bytes of the driver's GPU `index`, by NVML, which may number GPUs in another order."""
    from ctypes import byref, c_int, c_ubyte, c_uint64, c_void_p

    device, uuid = c_int(), (c_ubyte * 16)()
    handle, sizes = c_void_p(), (c_uint64 * 3)()  # total, free and used bytes
    if driver.cuInit(0) or driver.cuDeviceGet(byref(device), index):
        return None
    if driver.cuDeviceGetUuid_v2(byref(uuid), device) or management.nvmlInit_v2():
        return None
    name = f"GPU-{UUID(bytes=bytes(uuid))}".encode()
    if management.nvmlDeviceGetHandleByUUID(name, byref(handle)):
        return None
    return None if management.nvmlDeviceGetMemoryInfo(handle, byref(sizes)) else int(sizes[1])


def _torch_cuda() -> str | None:
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None
