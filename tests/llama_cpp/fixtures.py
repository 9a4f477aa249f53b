"""The results of `make gguf` in tests/data/gguf: files by llama.cpp's converter, its
logits, and all verdicts.
"""

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parents[1] / "data" / "gguf"
KEPT = (
    "llama3-gqa",
    "mixtral",
    "qwen2",
    "qwen2-moe",
    "qwen3",
    "qwen3-moe",
    "gemma2",
    "gemma3",
    "phi2",
    "phi3-longrope",
    "smollm3",
    "granite",
    "olmo2",
    "olmoe",
    "command-r",
    "command-r7b",
    "stablelm-parallel",
    "starcoder2",
    "gpt2",
    "starcoder",
    "gpt-neox",
    "falcon-7b",
    "falcon-40b",
    "bloom",
    "mpt",
    "nemotron",
    "deepseek-v2",
    "deepseek-v3",
    "gpt-oss",
    "gpt-oss-mxfp4",
)
"""A file for each architecture, and for each change that the converter makes to tensors."""
LENGTH = 48
"""Tokens that a test computes, more than any window of the variants."""
ROWS = (0, 1, 12, LENGTH - 1)
"""Rows whose logits are kept."""
_PACKING = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}
]  # numbers of four bytes


class Verdict(NamedTuple):
    """The result of a case."""

    right: bool
    """Whether it is as expected."""
    what: str = ""
    error: float | None = None
    """Maximum relative error of a row of logits."""
    error_with_approximations: float | None = None
    """The error with llama.cpp's approximations."""

    def __str__(self) -> str:
        errors = (
            ""
            if self.error is None
            else f"{self.error:.0e}, with approximations {self.error_with_approximations:.0e}"
        )
        return ("" if self.right else "WRONG: ") + ", ".join(
            part for part in (errors, self.what) if part
        )


def write(package: str, found: Mapping[str, Verdict], scratch: Path) -> None:
    """Keep verdicts of a package, with some files and logits from `scratch`."""
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.gguf.xz"):
        file.unlink()
    for name in KEPT:
        (FOLDER / f"{name}.gguf.xz").write_bytes(
            lzma.compress((scratch / f"{name}.gguf").read_bytes(), filters=_PACKING)
        )
    np.savez(
        FOLDER / "logits.npz",
        **{name: np.load(scratch / f"{name}.npy")[list(ROWS)] for name in KEPT},
    )
    errors = {
        name: [float(f"{error:.0e}") for error in (v.error, v.error_with_approximations)]
        for name, v in found.items()
        if v.error is not None
    }
    (FOLDER / "verdicts.json").write_text(
        json.dumps({"package": package, "errors": errors}, indent=1) + "\n"
    )


def unpack(name: str, folder: Path) -> Path:
    """The GGUF file of a case, in a folder."""
    file = folder / f"{name}.gguf"
    file.write_bytes(lzma.decompress((FOLDER / f"{name}.gguf.xz").read_bytes()))
    return file


def logits(name: str) -> NDArray[np.float32]:  # [ROWS, vocab]
    """llama.cpp's logits of the file."""
    with np.load(FOLDER / "logits.npz") as arrays:
        kept: NDArray[np.float32] = arrays[name]
    return kept


def verdicts() -> dict[str, tuple[float, float]]:
    """The maximum relative error of each case that llama.cpp runs, and with its
    approximations.
    """
    found: dict[str, tuple[float, float]] = _kept()["errors"]
    return found


def package() -> str:
    """The llama.cpp package and version that made the verdicts."""
    return str(_kept()["package"])


def _kept() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((FOLDER / "verdicts.json").read_text())
    return kept
