"""Errors of our quantised blocks relative to llama.cpp's, for the same rows without
importance.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.source import resolve
from headrace.quant.encode import ENCODERS, encode
from tests.llama_cpp.mixtures import WORKER

Floats = NDArray[np.float32]

MAX_RATIOS = 1.02
"""Maximum ratios."""
NAMES = tuple(name for name in ENCODERS if name != "F32")
_COLS = 1024
_PLACES = ("token_embd", "blk.0.attn_q", "blk.5.ffn_down", "blk.20.ffn_up", "blk.29.attn_v")


def ratios(
    python: str, environment: Mapping[str, str], scratch: Path
) -> dict[str, dict[str, float]]:
    """Squared errors of our blocks over llama.cpp's, by rows and format."""
    return {name: _ratios(rows, python, environment, scratch) for name, rows in _rows().items()}


def too_large(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The ratios above their maximum."""
    return [
        f"{name} of {rows}: {ratio:.3f}"
        for rows, by in found.items()
        for name, ratio in by.items()
        if not ratio <= MAX_RATIOS
    ]


def _rows() -> dict[str, Floats]:
    """Numbers of two distributions, and weights of the default model, moved off the
    grid of its file.
    """
    rng = np.random.default_rng(0)
    tensors = read_gguf(resolve("smollm2")).tensors
    weights = np.concatenate(
        [
            tensors[f"{place}.weight"].dequantise_rows(range(128)).reshape(-1, _COLS)
            for place in _PLACES
        ]
    )
    return {
        "normal": rng.normal(0, 0.02, (256, _COLS)).astype(np.float32),
        "heavy-tailed": (rng.standard_t(3, (256, _COLS)) * 0.02).astype(np.float32),
        "weights": weights
        + (rng.uniform(-0.1, 0.1, weights.shape) * np.abs(weights).mean()).astype(np.float32),
    }


def _ratios(
    rows: Floats, python: str, environment: Mapping[str, str], scratch: Path
) -> dict[str, float]:
    source, result = scratch / "rows.npy", scratch / "quantised.npz"
    np.save(source, rows)
    types = {name: int(gguf.GGMLQuantizationType[name]) for name in NAMES}
    subprocess.run(
        [python, str(WORKER), "rows", str(source), json.dumps(types), str(result)],
        env=environment,
        timeout=300,
        check=True,
    )
    with np.load(result) as theirs:
        return {
            name: _error(name, encode(name, rows), rows) / _error(name, theirs[name], rows)
            for name in NAMES
        }


def _error(name: str, codes: NDArray[np.uint8], rows: Floats) -> float:
    flat = np.ascontiguousarray(codes.reshape(len(rows), -1))
    values = gguf.quants.dequantize(
        flat.view(np.float16) if name == "F16" else flat, gguf.GGMLQuantizationType[name]
    )
    return float(np.square(values.astype(np.float64) - rows).sum())
