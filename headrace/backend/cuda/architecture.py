"""What kernels must know about the GPU: its size and its instructions.

Plans for other GPUs read this without torch.
"""

from typing import NamedTuple


class Architecture(NamedTuple):
    capability: tuple[int, int]  # CUDA compute capability
    multiprocessors: int
    shared_bytes: int  # Max shared memory of one program
    has_ptx: bool = True  # Whether kernels may contain PTX

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU converts fp8 (e4m3)."""
        return self.has_ptx and self.capability >= (8, 9)

    @property
    def has_wgmma(self) -> bool:
        """Whether 4 warps multiply together, with an operand in shared memory (Hopper)."""
        return self.has_ptx and self.capability[0] == 9


A100 = Architecture((8, 0), 108, 163 << 10)
L4 = Architecture((8, 9), 58, 99 << 10)
H100 = Architecture((9, 0), 132, 227 << 10)
B200 = Architecture((10, 0), 148, 227 << 10)
RTX_5090 = Architecture((12, 0), 170, 99 << 10)

_current: Architecture | None = None


def architecture() -> Architecture:
    """The GPU of this process; an H100 without PTX in the interpreter."""
    from headrace.backend.cuda.interpreter import is_interpreting

    global _current
    if _current is None:
        _current = H100._replace(has_ptx=False) if is_interpreting() else _of_device()
    return _current


def set_architecture(gpu: Architecture) -> None:
    """Choose tiles and kernels for another GPU than the one at hand, to compile them."""
    global _current
    _current = gpu


def _of_device() -> Architecture:
    import torch
    import triton

    index = torch.cuda.current_device()
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return Architecture(
        capability=torch.cuda.get_device_capability(index),
        multiprocessors=properties["multiprocessor_count"],
        shared_bytes=properties["max_shared_mem"],
        has_ptx=torch.version.hip is None,
    )
