"""Calibration files of lossy modes for tiny models."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.loader.calibration_file import write_calibration

THRESHOLDS, EXIT = "thresholds.json", "exit.json"
"""Names that `with_files` replaces by paths."""
EXIT_LAYERS = 1


@cache
def _folder() -> TemporaryDirectory[str]:
    """Thresholds that half of the numbers pass, and an exit that half of the rows take."""
    folder = TemporaryDirectory()
    names = [f"layers.{layer}.{name}" for layer in range(4) for name in ("q", "o", "gate", "down")]
    thresholds = {"sparsity": 0.5, "thresholds": dict.fromkeys(names, 0.3)}
    exits = {"layers": EXIT_LAYERS, "min_margin": 0.05}
    write_calibration(Path(folder.name) / THRESHOLDS, "activation_sparsity", "", thresholds)
    write_calibration(Path(folder.name) / EXIT, "early_exit", "", exits)
    return folder


def with_files(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which each of the names is the path of its file."""
    return {
        name: str(Path(_folder().name) / value) if value in (THRESHOLDS, EXIT) else value
        for name, value in options.items()
    }
