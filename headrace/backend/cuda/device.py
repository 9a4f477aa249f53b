"""Device of the GPU backend's tensors: the GPU, or the CPU if kernels are interpreted."""

from functools import cache

import torch

from headrace.backend.cuda.interpreter import is_interpreting

DEVICE = torch.device("cpu" if is_interpreting() else "cuda")


@cache
def multiprocessors() -> int:
    return (
        1
        if is_interpreting()
        else int(torch.cuda.get_device_properties(DEVICE).multi_processor_count)
    )


def instructions() -> str:
    """The GPU and the compiler of its kernels, on which the bits of results depend."""
    name = "interpreter" if is_interpreting() else torch.cuda.get_device_name(DEVICE)
    return f"{name}, torch {torch.__version__}"
