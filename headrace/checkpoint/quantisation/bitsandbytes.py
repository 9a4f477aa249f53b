"""bitsandbytes checkpoints of 4 and 8 bits, version 0.50.

QLoRA (Dettmers et al. 2023): `X.weight` has two codes per byte, the first in the high half;
`X.weight.quant_map` float32 [16] has their values, `X.weight.absmax` float32 a scale for each
`blocksize` codes of the whole matrix, and `X.weight.quant_state.bitsandbytes__nf4` or `__fp4` a
JSON object. Quantised scales are nested_quant_map[absmax] * nested_absmax + nested_offset.

LLM.int8 (Dettmers et al. 2022): `X.weight` int8 [rows, cols], `X.SCB` float32 [rows], the value
of code 127, and `X.weight_format` uint8, which is 0.
"""

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.quantisation.method import Config, Tensors, refusal
from headrace.checkpoint.quantisation.tables import plain, row_numbers
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.dequantise import Parts, Rows
from headrace.quant.formats import FORMATS, Format, StoredTensor, TensorPart, table_format
from headrace.quant.spec import CODEBOOKS, Codebook, QuantSpec, TableRows
from headrace.record import frozen

_METHOD = "bitsandbytes"
_STATE = ".quant_state.bitsandbytes__"
_KINDS: tuple[Codebook, ...] = ("nf4", "fp4")
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_MAX_STATE_BYTES = 1 << 16
_MAX_OFFSET = 1e38
_THRESHOLD = 6.0


@frozen
class _Blocks:
    kind: Codebook
    cols: int
    size: int
    """Codes of a block."""
    nested: int
    """Scales that share a scale; 0 if scales are not quantised."""

    @property
    def group(self) -> int:
        return math.gcd(self.cols, self.size)


class BitsAndBytes:
    """nf4, fp4 and int8.

    Activations of int8 weights beyond `llm_int8_threshold` stay float32, by row; 0: all are int8.
    """

    supported = f"{_METHOD} of 4 bits (nf4, fp4; scales quantised again or not) or 8 (LLM.int8)"

    def check(self, config: Config) -> None:
        is_4bit, is_8bit = (
            config.get(field, config.get("_" + field)) for field in ("load_in_4bit", "load_in_8bit")
        )
        if bool(is_4bit) == bool(is_8bit):
            raise refusal("load_in_4bit", is_4bit, self.supported)
        if is_4bit and config.get("bnb_4bit_quant_type", "fp4") not in _KINDS:
            raise refusal("bnb_4bit_quant_type", config["bnb_4bit_quant_type"], self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        result = dict(tensors)
        has_outliers = config.get("llm_int8_threshold", _THRESHOLD)
        int8_format = FORMATS["I8_MIXED" if has_outliers else "I8_ROW"]
        for name, tensor in tensors.items():
            weight, _, kind = name.partition(_STATE)
            if kind:
                result[weight] = _fours(weight, kind, tensors, where)
                part_names = (name, *(weight + part for part in _PARTS))
            elif tensor.format.name == "I8":
                layer = name.removesuffix("weight")
                result[name] = _int8(name, layer, int8_format, tensors, where)
                part_names = (f"{layer}SCB", f"{name}_format")
            else:
                continue
            for part in part_names:
                result.pop(part, None)
        return result


def _int8(name: str, layer: str, kind: Format, tensors: Tensors, where: str) -> StoredTensor:
    tensor, scale, layout = tensors[name], tensors.get(f"{layer}SCB"), tensors.get(f"{name}_format")
    if layout is not None and plain(layout).any():
        raise UnsupportedModelError(
            f"{where}: tensor {name}_format is {plain(layout).tolist()}; supported: 0, row-major"
        )
    if (
        scale is None
        or scale.format.name != "F32"
        or len(tensor.shape) != 2
        or scale.shape != (tensor.rows,)
    ):
        raise FormatError(
            f"{where}: tensor {name} of int8 {list(tensor.shape)} has no {layer}SCB with a "
            "float32 for each row"
        )
    maxima = plain(scale)
    if not np.isfinite(maxima).all():
        raise FormatError(f"{where}: tensor {layer}SCB has a number that is not finite")
    parts = {**tensor.parts, "row_scales": maxima / np.float32(127)}
    return replace(tensor, format=kind, parts=parts)


def _fours(name: str, kind: str, tensors: Tensors, where: str) -> StoredTensor:
    state, tensor = _state(tensors[f"{name}{_STATE}{kind}"], where), tensors.get(name)
    codebook = next((known for known in _KINDS if known == kind), None)
    if codebook is None:
        raise UnsupportedModelError(
            f"{where}: tensor {name} is {kind[:32]}; supported: {', '.join(_KINDS)}"
        )
    rows, cols = state["shape"]
    if tensor is None or cols % 2 or tensor.parts["codes"].size * 2 != rows * cols:
        raise FormatError(
            f"{where}: tensor {name} does not have the bytes of a matrix {[rows, cols]} of 4 bits "
            "with columns in pairs"
        )
    absmax = _part(f"{name}.absmax", tensors, where)
    values = _part(f"{name}.quant_map", tensors, where)
    if values.shape != (16,) or not np.allclose(
        values.astype(np.float64), CODEBOOKS[codebook], rtol=0, atol=1e-6
    ):
        raise FormatError(
            f"{where}: tensor {name}.quant_map does not have the 16 values of {codebook}"
        )
    is_nested = absmax.dtype == np.uint8
    blocks = _Blocks(
        kind=codebook,
        cols=cols,
        size=state["blocksize"],
        nested=state.get("nested_blocksize", 0) if is_nested else 0,
    )
    if absmax.shape != (-(-rows * cols // blocks.size),):
        raise FormatError(
            f"{where}: tensor {name}.absmax has shape {list(absmax.shape)}, which does not fit "
            f"blocks of {blocks.size} in a matrix {[rows, cols]}"
        )
    if blocks.group not in (cols, 16) and blocks.group % 32:
        raise UnsupportedModelError(
            f"{where}: tensor {name} has blocks of {blocks.size} in rows of {cols}; supported: "
            "16 columns, or a multiple of 32, with one scale"
        )
    parts = {"codes": tensor.parts["codes"].reshape(rows, cols // 2), "absmax": absmax}
    if is_nested:
        parts |= _nested(name, absmax, state, tensors, where)
    elif not np.isfinite(absmax).all():
        raise FormatError(f"{where}: tensor {name}.absmax has a number that is not finite")
    return replace(tensor, name=name, format=_format(blocks), shape=(rows, cols), parts=parts)


def _nested(
    name: str, absmax: NDArray[Any], state: dict[str, Any], tensors: Tensors, where: str
) -> dict[str, NDArray[Any]]:
    scales = _part(f"{name}.nested_absmax", tensors, where)
    values = _part(f"{name}.nested_quant_map", tensors, where)
    size: Any
    offset: Any
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not _is_size(size) or type(offset) not in (int, float) or not abs(offset) < _MAX_OFFSET:
        raise FormatError(
            f"{where}: tensor {name} has quantised scales, but no valid nested_blocksize and "
            "nested_offset"
        )
    if (
        scales.dtype != np.float32
        or values.dtype != np.float32
        or scales.shape != (-(-len(absmax) // size),)
        or values.shape != (256,)
    ):
        raise FormatError(
            f"{where}: tensors {name}.nested_absmax and {name}.nested_quant_map do not "
            f"fit {len(absmax)} quantised scales"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        max_scale = np.abs(values).max() * np.abs(scales).max() + np.abs(np.float32(offset))
    if not np.isfinite(max_scale):
        raise FormatError(
            f"{where}: tensor {name}.nested_absmax or .nested_quant_map makes a scale that is "
            "not finite"
        )
    return {
        "nested_absmax": scales,
        "nested_quant_map": values,
        "nested_offset": np.array([offset], np.float32),
    }


def _part(name: str, tensors: Tensors, where: str) -> NDArray[Any]:
    tensor = tensors.get(name)
    if (
        tensor is None
        or len(tensor.shape) != 1
        or tensor.format.name not in ("U8", "F32", "F16", "BF16")
    ):
        raise FormatError(f"{where}: tensor {name} is missing or not a list of numbers")
    return plain(tensor) if tensor.format.name in ("U8", "F32") else tensor.dequantise()


def _state(tensor: StoredTensor, where: str) -> dict[str, Any]:
    if tensor.format.name != "U8" or tensor.nbytes > _MAX_STATE_BYTES:
        raise FormatError(
            f"{where}: tensor {tensor.name} is not a JSON object of up to "
            f"{_MAX_STATE_BYTES:,} bytes"
        )
    try:
        state = json.loads(tensor.parts["codes"].tobytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: tensor {tensor.name} is not valid JSON: {error}") from None
    shape = state.get("shape") if isinstance(state, dict) else None
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(map(_is_size, (*shape, state.get("blocksize"))))
    ):
        raise FormatError(
            f"{where}: tensor {tensor.name} has no valid shape [rows, columns] and blocksize"
        )
    checked: dict[str, Any] = state
    return checked


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 48


@cache
def _format(blocks: _Blocks) -> Format:
    groups = blocks.cols // blocks.group
    spec = QuantSpec(
        bits=4, group=0 if groups == 1 else blocks.group, scale="f32", codebook=blocks.kind
    )
    shared = {"absmax": "u1" if blocks.nested else "f4"}
    if blocks.nested:
        shared |= {"nested_absmax": "f4", "nested_quant_map": "f4", "nested_offset": "f4"}
    parts = {"codes": TensorPart("u1")}
    parts |= {name: TensorPart(dtype, by_row=False) for name, dtype in shared.items()}

    def table_rows(stored: Parts, rows: Rows) -> TableRows:
        pairs = stored["codes"][rows]
        codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(len(pairs), -1)
        group = row_numbers(stored, rows)[:, None] * groups + np.arange(groups)
        block = group * blocks.group // blocks.size
        scales = stored["absmax"][block]
        if blocks.nested:
            values = stored["nested_quant_map"][scales]
            nested_scales = stored["nested_absmax"][block // blocks.nested]
            scales = values * nested_scales + stored["nested_offset"]
        return TableRows(codes, scales)

    return table_format(spec.name, spec, parts, table_rows)
