"""What goes into the matrices of a model while it reads a text: the sums of products that GPTQ weighs errors with.

The model runs op by op, and the rows that each linear op reads are taken from it. Where all sums together are larger than `memory`, the
text is read several times, for some matrices each.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.backend import cpu
from headrace.config import KvConfig
from headrace.convert.batches import num_blocks, piece_batch
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program.ops import Linear
from headrace.quant.formats import StoredTensor

MEMORY = 2 << 30
"""Bytes of sums at a time."""

Floats = NDArray[np.float32]


def input_products(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    pieces: list[list[int]],
    names: list[str],
    threads: int,
    tell: Callable[[float], None],
    memory: int = MEMORY,
) -> Iterator[tuple[Floats, list[str]]]:
    """For the inputs of the named matrices, X^T X / rows over all rows of all pieces [cols, cols], and the matrices that read it.

    `tell` hears how much of the work is done, from 0 to 1. Matrices of experts have no input of their own, and are left out.
    """
    program = trace_model(spec, tensors)
    readers: dict[int, list[str]] = {}
    widths: dict[int, int] = {}
    for op in program.ops:
        if isinstance(op, Linear) and op.weight.name in names:
            readers.setdefault(op.x.id, []).append(op.weight.name)
            widths[op.x.id] = op.x.width
    turns = _turns(widths, memory)
    blocks = num_blocks(max(map(len, pieces)))
    kv = KvConfig((blocks,) * len(program.kv_groups))
    for number, turn in enumerate(turns):
        executable = cpu.CpuExecutable(program, tensors, kv, threads, "", lower=cpu.sized, kept=frozenset(turn))
        sums = {value: np.zeros((widths[value], widths[value]), np.float32) for value in turn}
        for i, piece in enumerate(pieces):
            # All rows have logits, or the last layers read some rows alone.
            executable.launch(piece_batch(piece, 0, len(piece), len(piece), blocks, len(program.kv_groups))).wait()
            for value, total in sums.items():
                rows = executable.value(value, len(piece))
                total += rows.T @ rows
            tell((number + (i + 1) / len(pieces)) / len(turns))
        executable.close()
        num_rows = sum(map(len, pieces))
        for value in turn:
            yield sums.pop(value) / np.float32(num_rows), readers[value]


def _turns(widths: Mapping[int, int], memory: int) -> list[list[int]]:
    """The values in groups whose sums fit in the memory, or of one."""
    turns: list[list[int]] = []
    left = 0
    for value, width in widths.items():
        size = 4 * width * width
        if not turns or size > left:
            turns.append([])
            left = memory
        turns[-1].append(value)
        left -= size
    return turns
