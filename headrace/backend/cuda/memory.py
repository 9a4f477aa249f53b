"""GPU memory: free bytes, the bytes that steps need, and out-of-memory errors."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.step_attention import step_tiles
from headrace.backend.cuda.step_memory import step_bytes
from headrace.backend.cuda.step_shape import prefill
from headrace.backend_traits import KvDtype
from headrace.errors import DeviceLostError, MemoryLimitError, RequestError
from headrace.program.trace import Program

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S")


def free_memory() -> int | None:
    """Free bytes of the GPU, with torch's cache; None in the interpreter.

    Raises RequestError if the GPU does not respond.
    """
    if is_interpreting():
        return None
    try:
        free, _ = torch.cuda.mem_get_info(DEVICE)
    except RuntimeError as error:  # the first use of the GPU: it may be busy, or full
        raise RequestError(
            f"the GPU cannot be used: {str(error).splitlines()[0]}; "
            "stop other programs on it, or choose backend cpu"
        ) from None
    return (
        int(free)
        + int(torch.cuda.memory_reserved(DEVICE))
        - int(torch.cuda.memory_allocated(DEVICE))
    )


def run_bytes(program: Program, kv_dtype: KvDtype, max_rows: int, max_logit_rows: int) -> int:
    """Bytes that steps of a lowered program need: its values, and scratch of single ops."""
    shape = prefill(max_rows, max_logit_rows)
    return step_bytes(program, shape, lambda group: step_tiles(group, kv_dtype, shape))


def device_errors(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate a method to raise errors of the GPU as errors of our own.

    If memory runs out, torch's cache is freed, and MemoryLimitError raised. If the GPU refuses
    all further work, DeviceLostError is raised.
    """

    @wraps(method)
    def wrapper(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            reason, is_full = _first_line(error), _is_out_of_memory(error)
            if not is_full and not is_lost():
                raise
        # Raise after the handler, which still holds the frames of the method and their tensors.
        if is_full:
            reason = reason.partition(". ")[0]
            raise MemoryLimitError(f"the GPU is out of memory: {reason}; {release_cache()}")
        raise DeviceLostError(f"the GPU failed, and a new process must start: {reason}")

    return wrapper


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: in torch, or in the driver as it loads a kernel or pins memory."""
    is_of_driver = isinstance(error, torch.AcceleratorError) or "Triton Error" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        is_of_driver and "out of memory" in str(error)
    )


def is_lost() -> bool:
    """Whether the GPU has failed for this process: after an illegal access or an error of its
    memory, each call fails.
    """
    if is_interpreting():
        return False
    try:
        torch.cuda.synchronize(DEVICE)
    except RuntimeError:
        return True
    return False


def release_cache() -> str:
    """Free torch's cache, and describe the memory for an error message."""
    if is_interpreting():
        return "kernels are interpreted in host memory"
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(DEVICE)
    ours = torch.cuda.memory_allocated(DEVICE)
    return (
        f"this engine holds {ours:,} of {total:,} bytes, {free:,} are free; lower "
        "max_num_batched_tokens, max_num_seqs or kv_blocks, or stop other programs on the GPU"
    )
