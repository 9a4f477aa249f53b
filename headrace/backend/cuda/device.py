"""Device of the GPU backend's tensors: the GPU, or the CPU if kernels are interpreted."""

import torch

from headrace.backend.cuda.architecture import architecture
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.config import Activations

DEVICE = torch.device("cpu" if is_interpreting() else "cuda")


def use_gpu(index: int) -> None:
    """Use a GPU of this machine, in the calling thread."""
    if not is_interpreting():
        torch.cuda.set_device(index)


def multiprocessors() -> int:
    return 1 if is_interpreting() else architecture().multiprocessors


def instructions() -> str:
    """The GPU and the compiler of its kernels, on which the bits of results depend."""
    return f"{device_name()}, torch {torch.__version__}"


def device_name() -> str:
    return "interpreter" if is_interpreting() else torch.cuda.get_device_name(DEVICE)


def multiplied_type(activations: Activations) -> torch.dtype:
    """Type of activations in products."""
    return torch.float32 if activations == "f32" else torch.bfloat16
