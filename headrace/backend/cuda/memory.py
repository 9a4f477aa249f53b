"""GPU memory: free bytes, the bytes that steps need, and out-of-memory errors."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.step_attention import num_partials, step_tiles
from headrace.backend.cuda.step_shape import StepShape, prefill
from headrace.backend.cuda.workspace import Buffers, Rows
from headrace.backend_traits import KvDtype
from headrace.errors import DeviceLostError, MemoryLimitError, RequestError
from headrace.program import collective, moe, ops
from headrace.program.trace import Program

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S")

_FIXED = 512 << 20  # For kernels, graphs, matrices of adapters and the allocator's rounding


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
    rows, places = shape.counts, Buffers(program, torch.float32, ()).places
    outs = [out for op in program.ops if (out := op.output())]
    values = {(places[out.id], out.width, out.rows): rows[out.rows] * out.width for out in outs}
    widest = max(
        (
            sum(w.rows for w in op.matrices())
            for op in program.ops
            if isinstance(op, ops.QkvRopeWrite | ops.GluLinear)
        ),
        default=0,
    )
    experts = [
        op.top_k * (op.down[0].cols + op.out.width)
        for op in program.ops
        if isinstance(op, moe.Experts)
    ]
    numbers = sum(values.values()) + shape.rows * (widest + max(experts, default=0))
    numbers += _partial_numbers(program, kv_dtype, shape) + _gathered_numbers(program, rows)
    if program.logits:
        numbers += shape.logit_rows * program.logits.width  # adjusted by penalties
    return _FIXED + 4 * numbers


def _gathered_numbers(program: Program, rows: Rows) -> int:
    """Numbers of the largest exchange between ranks, as it arrives."""
    gathered = [0]
    for op in program.ops:
        match op:
            case collective.AllGather():
                widest = max(last - first for first, last in op.parts)
                gathered.append(len(op.parts) * rows[op.out.rows] * widest)
            case collective.OwnedRows() | collective.OwnedExperts():
                gathered.append(len(op.parts) * rows[op.out.rows] * op.out.width)
            case collective.ColumnsToRows() | collective.GatherShares():
                gathered.append(rows[op.out.rows] * op.out.width)
    return max(gathered)


def _partial_numbers(program: Program, kv_dtype: KvDtype, shape: StepShape) -> int:
    # All layers share the partial results.
    max_numbers = 0
    for op in program.ops:
        if isinstance(op, ops.Attention):
            group = next(group for group in program.kv_groups if op.layer in group.layers)
            partials = num_partials(shape, step_tiles(group, kv_dtype, shape))
            max_numbers = max(max_numbers, partials * op.num_heads * (op.head_dim + 2))
    return max_numbers


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
