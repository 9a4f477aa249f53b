"""Measures activations: thresholds for a share of zeros (TEAL), and the zeros that rows share."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.backend.cpu.executable import CpuExecutable, instructions, lower_unfused
from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import Checkpoint
from headrace.config import KvConfig
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.convert.spill_file import SpillFile
from headrace.convert.texts import calibration_pieces
from headrace.errors import RequestError
from headrace.loader.activation_sparsity import KIND, read_thresholds
from headrace.loader.calibration_file import write_calibration
from headrace.loader.load import open_files
from headrace.loader.options import engine_config
from headrace.measure.evaluate import Evaluation, Evaluator
from headrace.measure.options import ModelOptions
from headrace.measure.progress import ProgressCallback, ignore_progress, track
from headrace.model import trace_model
from headrace.planner.host import usable_cores
from headrace.planner.prices import Price
from headrace.program.op import Value
from headrace.program.ops import Activate, Glu
from headrace.program.sparsity import ZERO_ACTIVATIONS, sparse_inputs
from headrace.program.trace import Program
from headrace.record import frozen

BATCHES = (1, 2, 4, 8, 16, 32)
_ROWS = 64
_UNUSED_BITS = 15
"""Low bits of a magnitude that its bin ignores: an octave has 256 bins."""
_NUM_BINS = 1 << 31 - _UNUSED_BITS
_TRIALS = 50

Masks = Mapping[str, NDArray[np.bool_]]


@frozen(kw_only=True)
class SparsityCalibration:
    """Thresholds for a share of zeros, and the model's quality and speed with them."""

    sparsity: float
    thresholds: Mapping[str, float]
    full: Evaluation
    sparse: Evaluation


@frozen(kw_only=True)
class SharedZeros:
    """Zeros that all of some rows share, over all inputs, next to independent zeros."""

    rows: int
    measured: float
    independent: float
    """The mean over the inputs of X^rows, with the share X of zeros of an input."""


def calibrate_sparsity(
    model: str,
    sparsity: float,
    file: Path,
    *,
    tokens: int = 8192,
    length: int = 512,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[ModelOptions],
) -> SparsityCalibration:
    """Find the threshold of each input up to which `sparsity` of its numbers lie, and write them.

    The share is the same for all inputs (TEAL's uniform rule). `tokens`: of the calibration text,
    and of the evaluation text that gives the price in the file.

    Raises RequestError for a share that is not between 0 and 1, or a file that cannot be written.
    """
    checkpoint = open_files(model, engine_config(options))
    thresholds = write_thresholds(
        file, checkpoint, sparsity, tokens=tokens, length=length, on_progress=on_progress
    )
    evaluator = Evaluator(
        model, {**options, "activation_sparsity": str(file)}, None, tokens, length, on_progress
    )
    with SpillFile() as reference:
        evaluator.score_reference(None, reference)
        full = evaluator.evaluate("full", evaluator.tensors, reference)
        sparse = evaluator.evaluate_mode(reference)
    assert sparse.quality.kl is not None
    price = Price(
        text="Python's language reference",
        tokens=sparse.quality.tokens,
        nll=sparse.quality.nll,
        nll_full=full.quality.nll,
        kl=sparse.quality.kl,
    )
    _write(file, checkpoint, sparsity, thresholds, price)
    return SparsityCalibration(sparsity=sparsity, thresholds=thresholds, full=full, sparse=sparse)


def write_thresholds(
    file: Path,
    checkpoint: Checkpoint,
    sparsity: float,
    *,
    tokens: int,
    length: int = 512,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, float]:
    """Find thresholds by input, and write them without a price.

    Raises RequestError as `calibrate_sparsity`.
    """
    if not 0 < sparsity < 1:
        raise RequestError(f"sparsity is {sparsity:g}, but must be a share between 0 and 1")
    pieces = calibration_pieces(checkpoint, None, length, tokens)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    reader = _InputReader(program, checkpoint.tensors, sparse_inputs(program), length)
    counts = {name: np.zeros(_NUM_BINS, np.int64) for name in reader.inputs}
    for piece in track(pieces, len(pieces), "activations", on_progress):
        for name, rows in reader.read(piece):
            counts[name] += np.bincount(_bin_of(rows), minlength=_NUM_BINS)
    reader.close()
    thresholds = {name: _quantile(found, sparsity) for name, found in counts.items()}
    _write(file, checkpoint, sparsity, thresholds)
    return thresholds


def _write(
    file: Path,
    checkpoint: Checkpoint,
    sparsity: float,
    thresholds: Mapping[str, float],
    price: Price | None = None,
) -> None:
    own = fingerprint(checkpoint, checkpoint.load_tokenizer())
    facts: dict[str, object] = {"sparsity": sparsity, "thresholds": thresholds}
    if price:
        facts["price"] = asdict(price)
    write_calibration(file, KIND, own, facts)


def shared_zeros(
    model: str,
    *,
    activation_sparsity: str = "",
    tokens: int = 4096,
    length: int = 512,
    on_progress: ProgressCallback = ignore_progress,
) -> list[SharedZeros]:
    """Measure the zeros that 1 to 32 rows of different sequences share.

    A ReLU gives the zeros. With `activation_sparsity`, numbers up to its thresholds are zeros. With
    a share X of zeros, N independent rows share X^N.

    Raises RequestError for a model that has neither.
    """
    checkpoint = open_files(model, engine_config({}))
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    thresholds: Mapping[str, float] = {}
    if activation_sparsity:
        found = read_thresholds("activation_sparsity", activation_sparsity)
        thresholds, inputs = found.by_input, sparse_inputs(program)
    else:
        zeros = (
            op.out
            for op in program.ops
            if isinstance(op, Glu | Activate) and op.activation in ZERO_ACTIVATIONS
        )
        inputs = {f"activation {i}": value for i, value in enumerate(zeros)}
        if not inputs:
            raise RequestError(
                f"{model} has no ReLU, so its activations are never 0; give the thresholds of "
                "`headrace calibrate MODEL --sparsity 0.4` with activation_sparsity"
            )
    pieces = calibration_pieces(checkpoint, None, length, tokens)
    reader = _InputReader(program, checkpoint.tensors, inputs, length)
    masks: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in inputs}
    for piece in track(pieces, len(pieces), "activations", on_progress):
        for name, rows in reader.read(piece):
            masks[name].append(np.abs(rows) <= thresholds.get(name, 0.0))
    reader.close()
    return shares_of({name: np.concatenate(rows) for name, rows in masks.items()})


def shares_of(masks: Masks, batches: Sequence[int] = BATCHES) -> list[SharedZeros]:
    """Compare shared zeros with the formula. `masks`: [rows, columns] of each input, True for 0."""
    rng = np.random.default_rng(0)
    num_rows = min(len(mask) for mask in masks.values())
    result = []
    for rows in batches:
        chosen = [rng.choice(num_rows, min(rows, num_rows), replace=False) for _ in range(_TRIALS)]
        measured = [
            mask[rows_of].all(axis=0).mean() for mask in masks.values() for rows_of in chosen
        ]
        independent = [mask.mean() ** rows for mask in masks.values()]
        result.append(
            SharedZeros(
                rows=rows,
                measured=float(np.mean(measured)),
                independent=float(np.mean(independent)),
            )
        )
    return result


class _InputReader:
    """Runs a program in its own ops, and reads some of its values."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, object],
        inputs: Mapping[str, Value],
        length: int,
    ) -> None:
        self.inputs = inputs
        self._blocks, self._groups = num_blocks(length), len(program.kv_groups)
        kv = KvConfig((self._blocks,) * self._groups)
        self._executable = CpuExecutable(
            program,
            tensors,  # type: ignore[arg-type]
            kv,
            usable_cores(),
            instructions(),
            lower=lower_unfused,
            kept=frozenset(value.id for value in inputs.values()),
        )

    def read(self, piece: Sequence[int]) -> list[tuple[str, NDArray[np.float32]]]:
        """The rows of each input, without rows that only some values have."""
        found: dict[str, list[NDArray[np.float32]]] = {name: [] for name in self.inputs}
        for first in range(0, len(piece), _ROWS):
            end = min(first + _ROWS, len(piece))
            batch = sequence_batch(piece, first, end, end - first, self._blocks, self._groups)
            self._executable.launch(batch).wait()
            for name, value in self.inputs.items():
                found[name].append(self._executable.value(value.id, end - first).copy())
        return [(name, np.concatenate(rows)) for name, rows in found.items()]

    def close(self) -> None:
        self._executable.close()


def _bin_of(rows: NDArray[np.float32]) -> NDArray[np.int32]:
    """Numbers of bins in ascending order of magnitude: the bits of a float32 have its order."""
    return np.abs(rows.reshape(-1)).view(np.int32) >> _UNUSED_BITS


def _quantile(counts: NDArray[np.int64], share: float) -> float:
    """The magnitude up to which a share of the numbers lie, at the end of its bin."""
    below = np.searchsorted(np.cumsum(counts), share * counts.sum())
    return float(np.int32((below + 1) << _UNUSED_BITS).view(np.float32))
