"""Statistics of the inputs of matrices on a calibration text.

The text is read a few layers at a time. Between them, the residual stream of all tokens is in a
temporary file. So memory depends on the layers read together, not on the model.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from headrace.backend.cpu import executable as cpu
from headrace.config import KvConfig
from headrace.convert.matrices import ProgressCallback
from headrace.convert.scaling import gather_sources
from headrace.convert.segments import Segment, cut_segments
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.convert.spill_file import SpillFile
from headrace.errors import FormatError
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program.moe import Experts
from headrace.program.op import Op, Value
from headrace.program.ops import Linear
from headrace.program.trace import Program
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor

MEMORY = 512 << 20
"""Bytes of weights, activations and sums that are held at a time. One layer may need more."""
_ROWS = 1024
"""Rows of an input that are multiplied together."""
_COLUMNS = 1024
"""Columns of a block of a product. Blocks below the diagonal are mirrored."""


def input_products(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
    memory: int = MEMORY,
) -> Iterator[tuple[Floats, list[str]]]:
    """Yield X^T X / rows [cols, cols] for each input X, with the names of its matrices.

    Experts of a layer share an input; their down projections are left out. Raises FormatError
    if a product is not finite.
    """
    program = trace_model(spec, tensors)
    readers = _readers(program, names)
    num_rows = np.float32(sum(map(len, pieces)))
    sums: dict[Value, _ProductSum] = {}

    def add(value: Value, rows: Floats) -> None:
        if value not in sums:
            sums[value] = _ProductSum(value.width)
        sums[value].add(rows)

    def cost(value: Value) -> int:
        return 4 * value.width * (value.width + 2 * _ROWS)

    reading = _read(program, tensors, readers, pieces, threads, add, on_progress, memory, cost)
    for value in reading:
        products = sums.pop(value).products()
        products /= num_rows
        yield _check_finite(products, readers[value]), readers[value]


class _ProductSum:
    """The sum of X^T X over the rows of an input X."""

    def __init__(self, width: int) -> None:
        self._sum = np.zeros((width, width), np.float32)
        self._rows: list[Floats] = []
        self._num_rows = 0

    def add(self, rows: Floats) -> None:
        self._rows.append(rows.copy())
        self._num_rows += len(rows)
        if self._num_rows >= _ROWS:
            self._multiply()

    def products(self) -> Floats:
        """The sum [width, width]; call it once, at the end."""
        if self._rows:
            self._multiply()
        sums = self._sum
        for first in range(0, len(sums), _COLUMNS):
            last = first + _COLUMNS
            sums[last:, first:last] = sums[first:last, last:].T
        return sums

    def _multiply(self) -> None:
        x = np.concatenate(self._rows)
        for first in range(0, len(self._sum), _COLUMNS):
            self._sum[first : first + _COLUMNS, first:] += (
                x[:, first : first + _COLUMNS].T @ x[:, first:]
            )
        self._rows.clear()
        self._num_rows = 0


def input_column_stats(
    update: Callable[[Floats, Floats], None],
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
    memory: int = MEMORY,
) -> list[tuple[Floats, list[str]]]:
    """Compute numbers [cols] per input; `update(numbers, rows)` changes zeros in place.

    Returns and raises as `input_products`.
    """
    program = trace_model(spec, tensors)
    readers = _readers(program, names)
    stats = {value: np.zeros(value.width, np.float32) for value in readers}

    def add(value: Value, rows: Floats) -> None:
        update(stats[value], rows)

    reading = _read(
        program, tensors, readers, pieces, threads, add, on_progress, memory, lambda value: 0
    )
    return [(_check_finite(stats[value], readers[value]), readers[value]) for value in reading]


def input_rows(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
    memory: int = MEMORY,
) -> Iterator[tuple[Floats, list[str]]]:
    """Yield the rows [tokens, cols] of each input, with the names of its matrices.

    Raises FormatError if a number is not finite.
    """
    program = trace_model(spec, tensors)
    readers = _readers(program, names)
    num_rows = sum(map(len, pieces))
    rows: dict[Value, list[Floats]] = {}

    def add(value: Value, more: Floats) -> None:
        rows.setdefault(value, []).append(more.copy())

    def cost(value: Value) -> int:
        return 4 * value.width * num_rows

    reading = _read(program, tensors, readers, pieces, threads, add, on_progress, memory, cost)
    for value in reading:
        yield _check_finite(np.concatenate(rows.pop(value)), readers[value]), readers[value]


def update_maxima(maxima: Floats, rows: Floats) -> None:
    np.maximum(maxima, np.abs(rows).max(axis=0), out=maxima)


def update_squares(squares: Floats, rows: Floats) -> None:
    squares += np.einsum("rc,rc->c", rows, rows)


def _readers(program: Program, names: list[str]) -> dict[Value, list[str]]:
    selected, source = set(names), gather_sources(program)
    readers: dict[Value, list[str]] = {}
    for op in program.ops:
        if isinstance(op, Linear | Experts):
            weights = [op.weight] if isinstance(op, Linear) else [*op.gate, *op.up]
            if matrices := [weight.name for weight in weights if weight.name in selected]:
                readers.setdefault(source[op.x.id], []).extend(matrices)
    return readers


def _read(
    program: Program,
    tensors: Mapping[str, StoredTensor],
    readers: Mapping[Value, list[str]],
    pieces: list[list[int]],
    threads: int,
    add: Callable[[Value, Floats], None],
    on_progress: ProgressCallback,
    memory: int,
    cost: Callable[[Value], int],
) -> Iterator[Value]:
    """Read the text, call `add` for the rows of each input, and yield the finished inputs."""
    program = cpu.lower_unfused(program, tensors)
    row_bytes = 4 * max(map(len, pieces))

    def op_cost(op: Op) -> int:
        out = op.output()
        weight_bytes = sum(weight.nbytes for weight in op.weights())
        if out is None or out not in readers:
            return weight_bytes
        return weight_bytes + row_bytes * out.width + cost(out)

    segments = cut_segments(program, list(readers), memory, op_cost)
    hidden: SpillFile | None = None
    for number, segment in enumerate(segments):
        is_last = segment is segments[-1]
        spill = None if is_last else SpillFile()

        def on_piece(done: int, number: int = number) -> None:
            on_progress((number + done / len(pieces)) / len(segments))

        _run(segment, tensors, pieces, threads, add, hidden, spill, on_piece)
        if hidden is not None:
            hidden.close()
        hidden = spill
        yield from segment.inputs


def _run(
    segment: Segment,
    tensors: Mapping[str, StoredTensor],
    pieces: list[list[int]],
    threads: int,
    add: Callable[[Value, Floats], None],
    hidden: SpillFile | None,
    spill: SpillFile | None,
    on_piece: Callable[[int], None],
) -> None:
    """Run the pieces through a segment, from the rows in `hidden` to the rows in `spill`."""
    groups = len(segment.program.kv_groups)
    blocks = num_blocks(max(map(len, pieces)))
    kept = frozenset(value.id for value in (*segment.inputs, segment.result))
    executable = cpu.CpuExecutable(
        segment.program,
        tensors,
        KvConfig((blocks,) * groups),
        threads,
        "",
        lower=cpu.lower_unfused,
        kept=kept,
    )
    rows_before = None if hidden is None else iter(hidden)
    try:
        for i, piece in enumerate(pieces):
            # If only some rows had logits, the last layers would compute these rows alone.
            batch = sequence_batch(piece, 0, len(piece), len(piece), blocks, groups)
            if rows_before is not None:
                batch = batch._replace(inputs=next(rows_before))
            executable.run(batch, batch.tokens)
            for value in segment.inputs:
                add(value, executable.value(value.id, len(piece)))
            if spill is not None:
                spill.add(executable.value(segment.result.id, len(piece)))
            on_piece(i + 1)
    finally:
        executable.close()


def _check_finite(stats: Floats, names: list[str]) -> Floats:
    if not np.isfinite(stats).all():
        raise FormatError(
            f"tensor {names[0]}: its input for the calibration text is not finite; "
            "take another text, or another copy of the model"
        )
    return stats
