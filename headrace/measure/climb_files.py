"""The files of a climb: the model in other formats, in a folder that goes with the climb."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.source import cache_folder
from headrace.errors import HeadraceError, MemoryLimitError
from headrace.measure.climb_process import run_command
from headrace.measure.climb_rungs import WeightFile, Weights
from headrace.measure.placed_model import main_format
from headrace.planner.fit import RUNTIME_BYTES
from headrace.planner.host import available_memory

_TARGETS: dict[Weights, tuple[tuple[str, ...], ...]] = {
    # A GGUF file, or a folder if the family has no GGUF format.
    "f32": (("--to", "F32"), ("--to", "f32")),
    "int8": (("--to", "Q8_0"), ("--to", "int8-g32")),
    "int4": (("--to", "Q4_K_M"), ("--to", "int4-g32")),
    "w8a8": ((), ("--to", "w8a8", "--token-embedding-type", "int8-row")),
    "sparse": ((), ("--to", "int4-g32", "--sparsity", "2:4", "--calibration-tokens", "2048")),
}
"""Arguments of `headrace convert` for a GGUF file and for a folder."""
_BITS: dict[float, Weights] = {4: "int4", 5: "int4", 8: "int8", 32: "f32"}
"""Weights by the bits of a file's main format; mixtures of 4 bits have many tensors in 5."""


@contextmanager
def climb_folder() -> Iterator[Path]:
    """Yield an empty folder in the cache, and remove it. Folders of climbs that were killed go
    first.
    """
    home = cache_folder() / "climb"
    for old in home.glob("*"):
        if not old.name.isdecimal() or not _is_alive(int(old.name)):
            shutil.rmtree(old, ignore_errors=True)
    folder = home / str(os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def own_weights(checkpoint: Checkpoint) -> Weights:
    """The weights of which the model's files have most."""
    return _BITS.get(main_format(checkpoint).bits, "own")


def convert(checkpoint: Checkpoint, weights: Weights, folder: Path) -> WeightFile:
    """Make the file of some weights, or name the model's own.

    Raises HeadraceError if neither a file nor a folder can have them, MemoryLimitError if they do
    not fit.
    """
    if weights == own_weights(checkpoint):
        path = str(checkpoint.path)
        return WeightFile(weights=weights, path=path, format=main_format(checkpoint).name)
    if weights == "f32":
        _check_memory(checkpoint)

    error = HeadraceError("no file format has such weights")
    for target, suffix in zip(_TARGETS[weights], (".gguf", ""), strict=True):
        if not target:
            continue
        out = folder / f"{weights}{suffix}"
        try:
            run_command("convert", str(checkpoint.path), str(out), *target)
        except HeadraceError as failed:
            error = failed
            continue
        return WeightFile(
            weights=weights,
            path=str(out),
            format=target[1],
            convert=target,
            is_folder=not suffix,
        )
    raise error


def _check_memory(checkpoint: Checkpoint) -> None:
    needed = sum(4 * tensor.rows * tensor.cols for tensor in checkpoint.tensors.values())
    available = available_memory() - RUNTIME_BYTES
    if needed > available:
        raise MemoryLimitError(
            f"float32 weights need {needed / 1e9:,.1f} GB, and {max(0, available) / 1e9:,.1f} GB "
            "are available"
        )
