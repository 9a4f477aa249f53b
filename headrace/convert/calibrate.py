"""What goes into the matrices of a model while it reads a text: sums of products, which errors are
weighed with, and largest magnitudes.

The model runs op by op, and the rows that each linear op or mixture of experts reads are taken from
it. Where all sums together are larger than `memory`, the text is read several times, for some
matrices each.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.backend.cpu import executable as cpu
from headrace.config import KvConfig
from headrace.convert.batches import num_blocks, piece_batch
from headrace.convert.scaling import sources
from headrace.errors import FormatError
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program.moe import Experts
from headrace.program.op import Value
from headrace.program.ops import Linear
from headrace.program.trace import Program
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
    """For the inputs of the named matrices, X^T X / rows over all rows of all pieces [cols, cols],
    and the matrices that read it.

    `tell` hears how much of the work is done, from 0 to 1. What experts read is what all of them
    read together; what goes into their last matrices is left out. Raises FormatError, which names a
    tensor, where the model computes what is not finite.
    """
    program = trace_model(spec, tensors)
    readers = _readers(program, names)
    turns = _turns(readers, memory)
    num_rows = np.float32(sum(map(len, pieces)))
    for number, turn in enumerate(turns):
        sums = {value: np.zeros((value.width, value.width), np.float32) for value in turn}

        def add(value: Value, rows: Floats, sums: dict[Value, Floats] = sums) -> None:
            sums[value] += rows.T @ rows

        def tell_turn(done: float, number: int = number) -> None:
            tell((number + done) / len(turns))

        _read(program, tensors, pieces, turn, threads, add, tell_turn)
        for value in turn:
            yield _finite(sums.pop(value) / num_rows, readers[value]), readers[value]


def input_columns(
    add: Callable[[Floats, Floats], None],
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    pieces: list[list[int]],
    names: list[str],
    threads: int,
    tell: Callable[[float], None],
) -> list[tuple[Floats, list[str]]]:
    """The same with what `add` makes of the columns in place of products [cols]: from zeros on it
    is given that and rows, in place.
    """
    program = trace_model(spec, tensors)
    readers = _readers(program, names)
    found = {value: np.zeros(value.width, np.float32) for value in readers}
    _read(
        program,
        tensors,
        pieces,
        list(readers),
        threads,
        lambda value, rows: add(found[value], rows),
        tell,
    )
    return [(_finite(found[value], names), names) for value, names in readers.items()]


def maxima(largest: Floats, rows: Floats) -> None:
    """The largest magnitude in each column."""
    np.maximum(largest, np.abs(rows).max(axis=0), out=largest)


def squares(total: Floats, rows: Floats) -> None:
    """The sum of squares in each column: the diagonal of the products, without the rest."""
    total += np.einsum("rc,rc->c", rows, rows)


def _readers(program: Program, names: list[str]) -> dict[Value, list[str]]:
    """The values that the named matrices read, each with those."""
    wanted, source = set(names), sources(program)
    readers: dict[Value, list[str]] = {}
    for op in program.ops:
        if isinstance(op, Linear | Experts):
            weights = [op.weight] if isinstance(op, Linear) else [*op.gate, *op.up]
            if found := [weight.name for weight in weights if weight.name in wanted]:
                readers.setdefault(source[op.x.id], []).extend(found)
    return readers


def _read(
    program: Program,
    tensors: Mapping[str, StoredTensor],
    pieces: list[list[int]],
    values: list[Value],
    threads: int,
    add: Callable[[Value, Floats], None],
    tell: Callable[[float], None],
) -> None:
    """Run the program over all pieces; `add` is given the rows of each of the values in each
    piece.
    """
    blocks, groups = num_blocks(max(map(len, pieces))), len(program.kv_groups)
    kept = frozenset(value.id for value in values)
    executable = cpu.CpuExecutable(
        program, tensors, KvConfig((blocks,) * groups), threads, "", lower=cpu.sized, kept=kept
    )
    for i, piece in enumerate(pieces):
        # All rows have logits, or the last layers read some rows alone.
        executable.launch(piece_batch(piece, 0, len(piece), len(piece), blocks, groups)).wait()
        for value in values:
            add(value, executable.value(value.id, len(piece)))
        tell((i + 1) / len(pieces))
    executable.close()


def _finite(numbers: Floats, names: list[str]) -> Floats:
    """The same numbers of what the named matrices read."""
    if not np.isfinite(numbers).all():
        raise FormatError(
            f"tensor {names[0]}: what it is multiplied with in a text to calibrate with "
            "is not finite"
        )
    return numbers


def _turns(values: Mapping[Value, list[str]], memory: int) -> list[list[Value]]:
    """The values in groups whose sums fit in the memory, or of one."""
    turns: list[list[Value]] = []
    left = 0
    for value in values:
        size = 4 * value.width * value.width
        if not turns or size > left:
            turns.append([])
            left = memory
        turns[-1].append(value)
        left -= size
    return turns
