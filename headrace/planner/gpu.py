"""The GPU of this machine and what runs programs on it, found without importing any of it: a
machine without a GPU pays for nothing.
"""

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.record import frozen

LEAST_CAPABILITY = (8, 0)
"""Of GPUs that multiply bf16."""
INSTALL = "pip install 'headrace[cuda]', about 3 GB"
_DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
"""What a driver leaves on Linux, and on Linux in Windows."""
_LIBRARY = "libcuda.so.1"
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76
"""Numbers of attributes of a device (CUDA driver API, `CUdevice_attribute`)."""
_LONGEST_NAME = 256


@frozen
class Gpu:
    """A GPU, as its driver describes it."""

    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes in all."""
    multiprocessors: int
    cuda: tuple[int, int]
    """The newest CUDA that the driver is made for."""

    @property
    def isa(self) -> str:
        """What its kernels are compiled for."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@frozen
class GpuHost:
    """What there is to run programs on a GPU with."""

    gpu: Gpu | None = None
    no_gpu: str = ""
    """Why there is none."""
    absent: tuple[str, ...] = ()
    """Packages that are not installed."""
    torch_cuda: str | None = None
    """The CUDA that torch was built for; None: for the processor alone."""
    interprets: bool = False
    """Whether Triton is told to interpret its kernels, which needs no GPU."""

    @property
    def obstacle(self) -> str:
        """What is in the way of running programs on the GPU, and what to do about it; empty where
        nothing is.
        """
        if self.gpu is None:
            return self.no_gpu
        if self.gpu.capability < LEAST_CAPABILITY:
            least, its = (
                ".".join(map(str, one)) for one in (LEAST_CAPABILITY, self.gpu.capability)
            )
            return (
                f"{self.gpu.name} has compute capability {its}, and kernels need {least} or "
                "more: use the cpu backend"
            )
        if self.absent:
            return (
                f"{' and '.join(self.absent)} {'is' if len(self.absent) == 1 else 'are'} not "
                f"installed: {INSTALL}"
            )
        if self.torch_cuda is None:
            return f"torch is a build for the processor alone: pip uninstall torch, then {INSTALL}"
        if int(self.torch_cuda.partition(".")[0]) > self.gpu.cuda[0]:
            newest = ".".join(map(str, self.gpu.cuda))
            return (
                f"torch is built for CUDA {self.torch_cuda}, and the driver for {newest} at "
                "most: install a newer driver"
            )
        return (
            "TRITON_INTERPRET is set, by which kernels would be interpreted: unset it"
            if self.interprets
            else ""
        )


def look(root: Path = Path("/")) -> GpuHost:
    """What is there now. Without a trace of a driver, nothing but a few files is looked for."""
    gpu, why = find_gpu(root)
    absent = tuple(name for name in ("torch", "triton") if find_spec(name) is None)
    return GpuHost(
        gpu=gpu, no_gpu=why, absent=absent, torch_cuda=_torch_cuda(), interprets=interprets()
    )


def interprets(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> bool:
    """Whether Triton, once it is imported, interprets kernels."""
    return environment.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def find_gpu(root: Path = Path("/")) -> tuple[Gpu | None, str]:
    """The first GPU that this process may use, or why there is none."""
    if not any((root / file).exists() for file in _DRIVER_FILES):
        return None, "there is no NVIDIA driver on this machine: use the cpu backend"
    return _by_driver()


def driver_version(root: Path = Path("/")) -> str:
    """The version of the driver; empty where it does not say."""
    try:
        text = (root / _DRIVER_FILES[0]).read_text()
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    return found[1] if found else ""


@cache
def _by_driver() -> tuple[Gpu | None, str]:
    from ctypes import CDLL

    try:
        library = CDLL(_LIBRARY)
    except OSError:
        return (
            None,
            f"there is an NVIDIA driver, and not its library {_LIBRARY}: give this "
            "container the GPU (--gpus all)",
        )
    return ask_driver(library)


def ask_driver(library: Any) -> tuple[Gpu | None, str]:
    """The first GPU that the library of a driver shows, or why it shows none."""
    from ctypes import byref, c_int, c_size_t, create_string_buffer

    count, device, version, memory = c_int(), c_int(), c_int(), c_size_t()
    code = library.cuInit(0) or library.cuDeviceGetCount(byref(count))
    if code or not count.value:
        hidden = " (CUDA_VISIBLE_DEVICES is set)" if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        return (
            None,
            f"the NVIDIA driver shows no GPU{f', error {code}' if code else ''}{hidden}: "
            "see what nvidia-smi says",
        )
    name, numbers = create_string_buffer(_LONGEST_NAME), []
    library.cuDeviceGet(byref(device), 0)
    library.cuDeviceGetName(name, _LONGEST_NAME, device)
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
    ), ""


def _torch_cuda() -> str | None:
    """The CUDA that the installed torch was built for, by its own file."""
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None
