"""`marlin-24` of compressed-tensors (versions 0.9 to 0.14): 2:4 in the order of a GPU kernel.

A layer X of a matrix [rows, cols] has

* `X.weight_packed` int32 [cols / 32, rows * bits / 2]: kept codes of 4 or 8 bits, with
  2^(bits - 1) added. Tiles of 16 kept columns and 64 rows are in the order of the registers of a
  tensor core;
* `X.meta` int16 [cols / 32, 2 rows]: two indices of 2 bits for each 4 columns, in the order of
  CUTLASS (`reorder_meta`);
* `X.scale_packed` float16 [groups, rows], in an order of its own if groups are shorter than half a
  row.

The library writes it and has no reader. Matrices are decoded when a folder is opened.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.quantisation.method import Tensors
from headrace.checkpoint.quantisation.tables import plain, unpacked
from headrace.errors import FormatError
from headrace.quant.arrays import Bytes
from headrace.quant.formats import StoredTensor, plain_table
from headrace.quant.spec import QuantSpec

FORMAT = "marlin-24"
_META = ".meta"
_PARTS = (".weight_packed", ".scale_packed", _META)
_TILE_ROWS = 64
_TILE = 16
"""Kept columns of a tile."""
_META_COLS = 16
"""Columns whose indices share a number."""


def decoded(tensors: Tensors, widths: set[int], where: str) -> dict[str, StoredTensor]:
    """Make a matrix of the parts of each layer, with codes of one of `widths` bits.

    Raises FormatError for parts that do not fit.
    """
    layers = [name.removesuffix(_META) for name in tensors if name.endswith(_META)]
    parts = {layer + part for layer in layers for part in _PARTS}
    result = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for layer in layers:
        if absent := [part for part in _PARTS if layer + part not in tensors]:
            raise FormatError(f"{where}: tensor {layer}{absent[0]} is missing")
        matrix = _matrix(layer, widths, tensors, where)
        result[matrix.name] = matrix
    return result


def _matrix(layer: str, widths: set[int], tensors: Tensors, where: str) -> StoredTensor:
    packed, scale, meta = (tensors[layer + part] for part in _PARTS)
    types = (packed.format.name, scale.format.name, meta.format.name)
    if types != ("I32", "F16", "I16") or any(
        len(part.shape) != 2 for part in (packed, scale, meta)
    ):
        raise FormatError(
            f"{where}: tensors {packed.name}, {scale.name} and {meta.name} are not int32, float16 "
            "and int16 matrices"
        )
    rows, cols = meta.shape[1] // 2, 2 * _TILE * meta.shape[0]
    fitting = [bits for bits in widths if packed.shape == (cols // 32, rows * bits // 2)]
    groups = scale.shape[0]
    group = cols // max(groups, 1)
    if (
        len(fitting) != 1
        or rows % _TILE_ROWS
        or not rows
        or scale.shape != (groups, rows)
        or groups * group != cols
        or (groups > 1 and group % 32)
    ):
        raise FormatError(
            f"{where}: tensors {packed.name} {list(packed.shape)}, {meta.name} {list(meta.shape)} "
            f"and {scale.name} {list(scale.shape)} do not belong to one matrix"
        )
    bits = fitting[0]
    scales = _scales(plain(scale), group if groups > 1 else 0, cols)
    if not np.isfinite(scales).all():
        raise FormatError(f"{where}: tensor {scale.name} has a number that is not finite")
    parts: dict[str, NDArray[Any]] = {
        "codes": _codes(plain(packed), bits, rows, cols),
        "scales": scales,
        "places": _places(plain(meta), rows, cols, meta.name, where),
    }
    spec = QuantSpec(bits=bits, group=group if groups > 1 else 0, is_sparse=True)
    return StoredTensor(
        name=f"{layer}.weight", format=plain_table(spec), shape=(rows, cols), parts=parts
    )


def _codes(packed: NDArray[np.int32], bits: int, rows: int, cols: int) -> Bytes:
    """Kept codes [rows, cols / 2]."""
    words = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1)
    in_tiles = unpacked(words, bits, rows * _TILE).reshape(-1, _TILE * _TILE_ROWS)
    codes = np.empty_like(in_tiles)
    codes[:, _tile_order(bits)] = in_tiles
    by_tile = codes.reshape(cols // 32, rows // _TILE, _TILE, _TILE)
    return np.ascontiguousarray(by_tile.transpose(1, 3, 0, 2)).reshape(rows, cols // 2)


@cache
def _tile_order(bits: int) -> NDArray[np.int64]:
    """The place in four tiles of 16 x 16 of each code of a kernel's tile."""
    thread, copy, block, pair = np.meshgrid(
        np.arange(32), np.arange(4), np.arange(2), np.arange(4), indexing="ij"
    )
    column = thread // 4
    kept_column = 2 * (thread % 4 + 4 * (pair // 2)) + pair % 2
    order = 16 * kept_column + 256 * (column // 2) + 8 * (column % 2) + 4 * block + copy
    interleaved = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    result: NDArray[np.int64] = order.reshape(-1, len(interleaved))[:, interleaved].reshape(-1)
    return result


def _scales(stored: NDArray[np.float16], group: int, cols: int) -> NDArray[np.float16]:
    """Scales [rows, groups]."""
    if not group or group >= cols // 2:
        return np.ascontiguousarray(stored.T)
    order = np.arange(_TILE_ROWS).reshape(8, 2, 4).transpose(0, 2, 1).reshape(-1)
    by_tile = stored.reshape(-1, _TILE_ROWS)
    scales = np.empty_like(by_tile)
    scales[:, order] = by_tile
    return np.ascontiguousarray(scales.reshape(stored.shape).T)


def _places(meta: NDArray[np.int16], rows: int, cols: int, name: str, where: str) -> Bytes:
    """Bits of the kept columns [rows, cols / 8]."""
    row, col = np.ogrid[:rows, : cols // _META_COLS]
    row = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4
    # The 2 x 2 blocks are transposed.
    step = ((row % 2 == 0) & (col % 2 == 1)).astype(int) - ((row % 2 == 1) & (col % 2 == 0))
    row, col = row + step, col - step
    numbers = meta.reshape(-1)[(col // 2 * rows + row) * 2 + col % 2].view(np.uint16)
    nibbles = numbers[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)
    first, second = nibbles & np.uint16(3), nibbles >> np.uint16(2)
    if (first >= second).any():
        raise FormatError(f"{where}: tensor {name} has indices that do not rise; it is damaged")
    masks = (1 << first | 1 << second).astype(np.uint8).reshape(rows, -1, 2)
    result: Bytes = masks[..., 0] | masks[..., 1] << np.uint8(4)
    return result
