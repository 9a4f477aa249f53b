"""GPU backend: Triton kernels over torch tensors. With TRITON_INTERPRET=1 the kernels run
on the CPU, in Triton's interpreter.
"""

from collections.abc import Mapping

from headrace.backend.cuda.interpreter import is_interpreting, mend

if is_interpreting():
    mend()  # before any kernel is defined

import torch

from headrace.backend.cuda.executable import CudaExecutable, lower
from headrace.backend.cuda.memory import give_back
from headrace.backend.cuda.stream import make_stream
from headrace.config import Activations, KvConfig
from headrace.errors import MemoryLimitError
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

__all__ = ["compile", "lower"]


def compile(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int,
    activations: Activations = "int8",
) -> CudaExecutable:
    """Compile a program for this process's GPU, or for the interpreter.

    Activations are multiplied in bf16, or in float32 if `activations` is "f32". `threads`
    is unused. Raises MemoryLimitError if weights and KV do not fit.
    """
    try:
        return CudaExecutable(
            program,
            weights,
            kv,
            torch.float32 if activations == "f32" else torch.bfloat16,
            make_stream(),
        )
    except torch.OutOfMemoryError:
        pass  # behind the handler nothing holds the tensors that were made
    needed = lower(program, weights).weight_bytes
    groups = zip(program.kv_groups, kv.num_blocks, strict=True)
    of_kv = sum(count * group.block_bytes(kv.dtype, kv.block_size) for group, count in groups)
    raise MemoryLimitError(
        f"{needed:,} bytes of weights and {of_kv:,} bytes of KV do not fit on the GPU: "
        f"{give_back()}"
    )
