"""Statistics of the inputs of matrices on a calibration text.

Limited memory may need several readings of the text.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from headrace.backend.cpu import executable as cpu
from headrace.config import KvConfig
from headrace.convert.matrices import ProgressCallback
from headrace.convert.scaling import gather_sources
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.errors import FormatError
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program.moe import Experts
from headrace.program.op import Value
from headrace.program.ops import Linear
from headrace.program.trace import Program
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor

MEMORY = 2 << 30
"""Bytes of sums in one reading."""


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
    passes = _passes(readers, memory)
    num_rows = np.float32(sum(map(len, pieces)))

    for number, inputs in enumerate(passes):
        sums = {value: np.zeros((value.width, value.width), np.float32) for value in inputs}

        def add(value: Value, rows: Floats, sums: dict[Value, Floats] = sums) -> None:
            sums[value] += rows.T @ rows

        def on_pass_progress(done: float, number: int = number) -> None:
            on_progress((number + done) / len(passes))

        _run(program, tensors, inputs, pieces, threads, add, on_pass_progress)
        for value in inputs:
            yield _check_finite(sums.pop(value) / num_rows, readers[value]), readers[value]


def input_column_stats(
    update: Callable[[Floats, Floats], None],
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    names: list[str],
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
) -> list[tuple[Floats, list[str]]]:
    """Compute numbers [cols] per input; `update(numbers, rows)` changes zeros in place.

    Returns and raises as `input_products`.
    """
    program = trace_model(spec, tensors)
    readers = _readers(program, names)
    stats = {value: np.zeros(value.width, np.float32) for value in readers}

    def add(value: Value, rows: Floats) -> None:
        update(stats[value], rows)

    _run(program, tensors, list(readers), pieces, threads, add, on_progress)
    return [(_check_finite(stats[value], names), names) for value, names in readers.items()]


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


def _run(
    program: Program,
    tensors: Mapping[str, StoredTensor],
    inputs: list[Value],
    pieces: list[list[int]],
    threads: int,
    add: Callable[[Value, Floats], None],
    on_progress: ProgressCallback,
) -> None:
    blocks, groups = num_blocks(max(map(len, pieces))), len(program.kv_groups)
    kept = frozenset(value.id for value in inputs)
    kv = KvConfig((blocks,) * groups)
    executable = cpu.CpuExecutable(
        program, tensors, kv, threads, "", lower=cpu.lower_unfused, kept=kept
    )

    for i, piece in enumerate(pieces):
        # With logits for a part of the rows, the last layers would compute these rows alone.
        executable.launch(sequence_batch(piece, 0, len(piece), len(piece), blocks, groups)).wait()
        for value in inputs:
            add(value, executable.value(value.id, len(piece)))
        on_progress((i + 1) / len(pieces))
    executable.close()


def _check_finite(stats: Floats, names: list[str]) -> Floats:
    if not np.isfinite(stats).all():
        raise FormatError(
            f"tensor {names[0]}: its input for the calibration text is not finite; "
            "take another text, or another copy of the model"
        )
    return stats


def _passes(inputs: Mapping[Value, list[str]], memory: int) -> list[list[Value]]:
    passes: list[list[Value]] = []
    free = 0
    for value in inputs:
        size = 4 * value.width * value.width
        if not passes or size > free:
            passes.append([])
            free = memory
        passes[-1].append(value)
        free -= size
    return passes
