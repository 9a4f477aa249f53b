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
from headrace.quant.arrays import Floats
from headrace.quant.encode import ENCODERS, encode
from headrace.quant.formats import FORMATS, Format, plain_table
from headrace.quant.rounding import round_to_nearest
from headrace.quant.sparse import kept, largest_two, places_of
from headrace.quant.spec import QuantSpec, encode_numbers

_DIFFERENT_ROWS = 64
"""Rows of a matrix before they repeat: encoding takes time, and products do not depend on it."""


def random_checkpoint(name: str, config: Mapping[str, Any], format: str | Format) -> Checkpoint:
    """Make a model of a `config.json`, with all matrices in one format and no tokenizer.

    Matrices of one shape share their stored numbers; a backend packs each for itself.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        checkpoint = open_dummy_checkpoint(file)
    parts: dict[tuple[str, tuple[int, ...]], dict[str, NDArray[Any]]] = {}
    tensors = {}
    stored = FORMATS[format] if isinstance(format, str) else format
    for tensor in dummy_tensors(checkpoint.spec, stored).values():
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
    if format.spec and format == plain_table(format.spec):
        table = _table_parts(format.spec, values)
        return {name: _repeated(part, rows) for name, part in table.items()}
    assert format.name in ("I8_ROW", "I8_MIXED"), f"no random weights in {format.name}"
    scales = np.abs(values).max(axis=1) / 127
    codes = np.rint(values / scales[:, None]).astype(np.int8).view(np.uint8)[:, :, None]
    return {
        "codes": np.ascontiguousarray(np.resize(codes, (rows, cols, 1))),
        "row_scales": np.resize(scales.astype(np.float32), rows),
    }


def _table_parts(spec: QuantSpec, values: Floats) -> dict[str, NDArray[Any]]:
    """Parts of `plain_table(spec)`; a sparse format keeps the two largest of every four values."""
    is_kept = largest_two(np.abs(values)) if spec.is_sparse else np.ones(values.shape, np.bool_)
    parts: dict[str, NDArray[Any]] = {"places": places_of(is_kept)} if spec.is_sparse else {}
    if spec.scale == "none":
        return parts | {"codes": kept(encode_numbers(values, "bf16"), is_kept)}
    rows = round_to_nearest(values, replace(spec, is_sparse=False), clip=False)
    return parts | {"codes": kept(rows.codes, is_kept), "scales": rows.scales}


def _repeated(part: NDArray[Any], rows: int) -> NDArray[Any]:
    return np.ascontiguousarray(np.resize(part, (rows, *part.shape[1:])))
