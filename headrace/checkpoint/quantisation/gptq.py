"""GPTQ checkpoints (Frantar et al. 2023) of AutoGPTQ 0.7, GPTQModel 7 and transformers.

A layer X has `X.qweight` I32 [cols * bits / 32, rows], `X.qzeros` I32 [groups, rows * bits /
32], `X.scales` [groups, rows] and `X.g_idx` I32 [cols], the group of each column. Codes are
packed lowest bits first. A weight is scale * (code - zero point). The format `gptq` stores zero
points less 1.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.quantisation.method import Config, Tensors, refusal
from headrace.checkpoint.quantisation.packed_codes import (
    Words,
    check_fields,
    check_group_size,
    check_shapes,
    finite_floats,
    gathered,
    group_of,
    numbers,
)
from headrace.checkpoint.quantisation.tables import unpacked
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.arrays import Bytes
from headrace.quant.dequantise import Parts, Rows
from headrace.quant.formats import Format, StoredTensor, TensorPart, table_format, table_parts
from headrace.quant.spec import QuantSpec, TableRows

_METHOD = "gptq"
_BITS = (2, 3, 4, 8)
_V1, _V2 = "gptq", "gptq_v2"
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_FIELDS: dict[str, tuple[Any, ...]] = {
    "bits": _BITS,
    "checkpoint_format": (None, _V1, _V2),
    "format": (None, _V1, _V2),
    "is_marlin_format": (None, False),
    "pack_dtype": (None, "int32"),
    "rotation": (None,),
    "adapter": (None,),
}
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


class Gptq:
    supported = (
        f"{_METHOD} with 2, 3, 4 or 8 bits in the checkpoint formats gptq and gptq_v2, groups "
        "of 16, of multiples of 32 or -1"
    )

    def check(self, config: Config) -> None:
        check_fields(config, _FIELDS, self.supported)
        # Regular expressions of layers with other bits; "-:" marks layers that stay plain.
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, dict) or not all(key.startswith("-:") for key in dynamic):
            raise refusal("dynamic", dynamic, self.supported)
        check_group_size(config, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        return gathered(
            tensors, _PARTS, lambda layer: _matrix(layer, config, tensors, where), where
        )


def _matrix(layer: str, config: Config, tensors: Tensors, where: str) -> StoredTensor:
    bits, name = config["bits"], f"{layer}qweight"
    words = numbers(tensors, name, "I32", 2, where)  # [words, rows]
    points = numbers(tensors, f"{layer}qzeros", "I32", 2, where)  # [groups, words]
    kind, scales = finite_floats(tensors, f"{layer}scales", where)  # [groups, rows]
    cols, rows = len(words) * 32 // bits, words.shape[1]
    group = group_of(cols, config["group_size"], name, where)
    if rows * bits % 32 or (bits == 3 and len(words) % 3):
        raise FormatError(
            f"{where}: tensor {name} has shape {list(words.shape)}, which codes of {bits} bits "
            "do not fill"
        )
    check_shapes(
        {"qzeros": points, "scales": scales},
        {"qzeros": (cols // group, rows * bits // 32), "scales": (cols // group, rows)},
        layer,
        where,
    )
    is_v2 = _V2 in (config.get("checkpoint_format"), config.get("format"))
    zeros = _zero_points(points, bits, is_less_1=not is_v2)
    middle = 1 << bits - 1
    if config.get("sym") is True and (zeros == middle + (-1 if is_v2 else 1)).all():
        # Some tools name the other format. Zero points of symmetric codes are known.
        zeros = np.full_like(zeros, middle)
    parts: dict[str, NDArray[Any]] = {
        "codes": words.T,
        "scales": np.ascontiguousarray(scales.T),
        "zeros": np.ascontiguousarray(zeros.T),
    }
    is_symmetric = bool((zeros == middle).all())
    if is_symmetric:
        del parts["zeros"]
    order = _column_order(tensors, f"{layer}g_idx", cols, group, where)
    if order is not None:
        parts["column_order"] = order
    spec = QuantSpec(
        bits=bits,
        group=group if group < cols else 0,
        scale=kind,
        zero="none" if is_symmetric else "point",
        zero_type=None if is_symmetric else "u8",
    )
    return StoredTensor(
        name=f"{layer}weight",
        format=_format(spec, is_ordered=order is not None),
        shape=(rows, cols),
        parts=parts,
    )


def _codes(words: Words, bits: int) -> Bytes:  # [rows, words * 32 / bits]
    """The codes of words [rows, words]."""
    return unpacked(np.ascontiguousarray(words).view(np.uint8), bits, words.shape[1] * 32 // bits)


def _zero_points(words: Words, bits: int, is_less_1: bool) -> Bytes:  # [groups, rows]
    """GPTQModel subtracts 1 from whole words of 2, 4 and 8 bits, so a zero point of 0
    borrows from the next.
    """
    if is_less_1 and bits in _ONES:
        return _codes(words + np.uint32(_ONES[bits]), bits)
    zeros = _codes(words, bits)
    return zeros + np.uint8(1) & np.uint8((1 << bits) - 1) if is_less_1 else zeros


def _column_order(
    tensors: Tensors, name: str, cols: int, group: int, where: str
) -> NDArray[np.int64] | None:
    if name not in tensors:
        return None
    groups = numbers(tensors, name, "I32", 1, where)
    if groups.shape != (cols,) or groups.max() >= cols // group:
        raise FormatError(
            f"{where}: tensor {name} does not assign {cols:,} columns to {cols // group:,} groups"
        )
    # Older files without an order have zeros here; exllama reads them in the same way.
    if not groups.any():
        return None
    if (np.bincount(groups, minlength=cols // group) != group).any():
        raise UnsupportedModelError(
            f"{where}: tensor {name} has groups that do not have {group} columns"
        )
    order = np.argsort(groups, kind="stable").astype(np.int64)
    return None if np.array_equal(order, np.arange(cols)) else order


@cache
def _format(spec: QuantSpec, is_ordered: bool) -> Format:
    """Codes are words <u4 [rows, words]."""
    parts = {"codes": TensorPart("<u4")} | table_parts(spec)
    if is_ordered:
        parts["column_order"] = TensorPart("<i8", by_row=False)

    def table_rows(stored: Parts, rows: Rows) -> TableRows:
        codes = _codes(stored["codes"][rows], spec.bits)
        if is_ordered:
            codes = codes[:, stored["column_order"]]
        zeros = stored["zeros"][rows] if spec.zero_type else None
        return TableRows(codes, stored["scales"][rows], zeros)

    return table_format(f"GPTQ {spec.name}", spec, parts, table_rows)
