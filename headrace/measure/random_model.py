"""Models of any shape with random weights, for measurements of speed."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.dummy import dummy_tensors, open_dummy_checkpoint
from headrace.checkpoint.load import Checkpoint
from headrace.quant.encode import ENCODERS, encode
from headrace.quant.formats import FORMATS, Format

_DIFFERENT_ROWS = 64
"""Rows of a matrix before they repeat: encoding takes time, and products do not depend on it."""


def random_checkpoint(name: str, config: Mapping[str, Any], format: str) -> Checkpoint:
    """Make a model of a `config.json`, with all matrices in one format and no tokenizer.

    Matrices of one shape share their stored numbers; a backend packs each for itself.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        checkpoint = open_dummy_checkpoint(file)
    parts: dict[tuple[str, tuple[int, ...]], dict[str, NDArray[Any]]] = {}
    tensors = {}
    for tensor in dummy_tensors(checkpoint.spec, FORMATS[format]).values():
        key = tensor.format.name, tensor.shape
        if key not in parts:
            parts[key] = _random_parts(tensor.format, tensor.rows, tensor.cols)
        tensors[tensor.name] = replace(tensor, parts=parts[key])
    return replace(checkpoint, spec=replace(checkpoint.spec, name=name), tensors=tensors)


def _random_parts(format: Format, rows: int, cols: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    some = min(rows, _DIFFERENT_ROWS)
    values = rng.standard_normal((some, cols), np.float32) / np.sqrt(np.float32(cols))
    if format.name in ENCODERS:
        codes = encode(format.name, values)
        return {"codes": np.ascontiguousarray(np.resize(codes, (rows, *codes.shape[1:])))}
    assert format.name in ("I8_ROW", "I8_MIXED"), f"no random weights in {format.name}"
    scales = np.abs(values).max(axis=1) / 127
    codes = np.rint(values / scales[:, None]).astype(np.int8).view(np.uint8)[:, :, None]
    return {
        "codes": np.ascontiguousarray(np.resize(codes, (rows, cols, 1))),
        "row_scales": np.resize(scales.astype(np.float32), rows),
    }
