"""Device of the GPU backend's tensors: the GPU, or the CPU if kernels are interpreted."""

import torch

from headrace.backend.cuda.architecture import architecture
from headrace.backend.cuda.interpreter import is_interpreting

DEVICE = torch.device("cpu" if is_interpreting() else "cuda")


def multiprocessors() -> int:
    return 1 if is_interpreting() else architecture().multiprocessors


def instructions() -> str:
    """The GPU and the compiler of its kernels, on which the bits of results depend."""
    name = "interpreter" if is_interpreting() else torch.cuda.get_device_name(DEVICE)
    return f"{name}, torch {torch.__version__}"
