"""GPU backend: Triton kernels over torch tensors. TRITON_INTERPRET=1 runs them on the
CPU, in Triton's interpreter.

torch and Triton are imported by `compile`: programs are lowered without them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.backend.cuda.lower import lower
from headrace.config import Activations, KvConfig
from headrace.errors import MemoryLimitError
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

if TYPE_CHECKING:
    from headrace.backend.cuda.exchange import Transport
    from headrace.backend.cuda.executable import CudaExecutable

__all__ = ["compile", "compile_share", "instructions", "lower"]


def instructions() -> str:
    """The GPU and the compiler of its kernels, on which the bits of results depend."""
    from headrace.backend.cuda import device

    return device.instructions()


def compile(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int,
    activations: Activations = "int8",
) -> "CudaExecutable":
    """Compile a program for this process's GPU, or for the interpreter.

    Tensor cores multiply bf16, or float32 if `activations` is "f32". `threads` is unused.
    Raises MemoryLimitError if weights and KV do not fit.
    """
    return compile_share(program, weights, kv, activations)


def compile_share(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    activations: Activations,
    transport: "Transport | None" = None,
) -> "CudaExecutable":
    """Compile the program of one rank, which exchanges rows with others. Raises as `compile`."""
    import torch

    from headrace.backend.cuda.device import multiplied_type
    from headrace.backend.cuda.executable import CudaExecutable
    from headrace.backend.cuda.memory import release_cache
    from headrace.backend.cuda.stream import make_stream

    try:
        return CudaExecutable(
            program,
            weights,
            kv,
            multiplied_type(activations),
            make_stream(),
            transport=transport,
        )
    except torch.OutOfMemoryError:
        pass  # raise after the handler, which still holds the tensors

    weight_bytes = lower(program, weights).weight_bytes
    groups = zip(program.kv_groups, kv.num_blocks, strict=True)
    kv_bytes = sum(count * group.block_bytes(kv.dtype, kv.block_size) for group, count in groups)
    raise MemoryLimitError(
        f"{weight_bytes:,} bytes of weights and {kv_bytes:,} bytes of KV do not fit on the GPU: "
        f"{release_cache()}"
    )
