"""Where tensors of the GPU backend are: on the GPU, or in the memory of the host where kernels are
interpreted.
"""

from functools import cache

import torch

from headrace.backend.cuda.interpreter import is_interpreting

DEVICE = torch.device("cpu" if is_interpreting() else "cuda")


@cache
def multiprocessors() -> int:
    """Multiprocessors of the GPU."""
    return (
        1
        if is_interpreting()
        else int(torch.cuda.get_device_properties(DEVICE).multi_processor_count)
    )
