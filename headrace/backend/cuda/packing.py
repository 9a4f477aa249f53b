"""Packing of stored tensors into matrices in GPU memory, some rows at a time."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.layout import ScaleStore, WeightLayout, layout_of
from headrace.backend.cuda.upload import in_threads, upload
from headrace.errors import UnsupportedModelError
from headrace.quant.dequantise import BlockScales
from headrace.quant.formats import StoredTensor
from headrace.quant.sparse import check_places
from headrace.quant.spec import CODEBOOKS, POWERS, Codebook, QuantSpec, floats

_CHUNK_CODES = 1 << 22  # Codes that a thread of the host unpacks at a time
# Max zero point of 4-bit codes: differences stay integers that bf16 holds exactly
_MAX_ZERO_POINT = 128

_PLAIN_NUMBERS = {"F32": "<f4", "F16": "<f2", "BF16": "<i2"}

_TYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "steps": torch.int32,
    "eighths": torch.int32,
}


def word_type(layout: WeightLayout) -> torch.dtype:
    """Type of the stored words of a layout."""
    return torch.int16 if layout.planes > 1 else _TYPES[layout.store]


class CodeRows(NamedTuple):
    codes: NDArray[
        Any
    ]  # [rows, cols] integers, or numbers of what is looked up, or the bits of small floats
    scales: NDArray[np.float32] | BlockScales  # [rows, scales of a row]
    zeros: NDArray[np.float32] | BlockScales | None
    places: NDArray[np.uint8] | None = None  # [rows, bytes of a row], of 2:4 weights


class PackedWeight(NamedTuple):
    """A matrix in GPU memory, or several of one layout, stacked by rows.

    A table of scales or zeros is float32 [groups, rows], or int32 [words of a row, rows].
    A word holds 16-bit numbers of two groups, the first in the low half. With
    super-blocks, one word holds the super-scale, so that its place in a word does not vary.
    The next words hold its sub-scales, four groups per word, the first in the lowest byte.
    """

    layout: WeightLayout
    rows: int
    cols: int
    codes: torch.Tensor  # [rows, tiles of a row in bytes or numbers]; of 2:4, the kept ones
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    lookup: torch.Tensor | None = None  # [16]
    column_order: torch.Tensor | None = (
        None  # [cols] columns of activations in the order in which a row has them
    )
    places: torch.Tensor | None = None  # int32 [words of a row, rows], of 2:4 weights
    whole_rows: int = 0  # Rows of all ranks, if this is a rank's share; else 0


def pack(tensors: Sequence[StoredTensor], layout: WeightLayout | None = None) -> PackedWeight:
    """Stack matrices with one column order, and release the pages of their files.

    `layout` defaults to the common layout. Raises UnsupportedModelError if zero points
    are too large.
    """
    layout, cols = layout or layout_of(tensors[0]), tensors[0].cols
    rows, groups = sum(tensor.rows for tensor in tensors), layout.num_groups(cols)
    dtype = word_type(layout)
    codes = torch.empty(rows, layout.row_bytes(cols) // dtype.itemsize, dtype=dtype, device=DEVICE)
    scales = empty_table(layout, layout.scale, rows, cols)
    zeros = empty_table(layout, layout.zero_store, rows, cols)
    places = None
    if layout.is_sparse:
        places = torch.empty(layout.place_words(cols), rows, dtype=torch.int32, device=DEVICE)

    first = 0
    for tensor in tensors:
        for part in in_threads(partial(_unpacked, tensor, layout), _chunks(tensor)):
            if not isinstance(part, CodeRows):
                last = first + len(part)
                numbers = upload(part)
                if numbers.dtype == torch.int16:
                    numbers = numbers.view(torch.bfloat16)
                codes[first:last, :cols] = numbers.to(codes.dtype)
                codes[first:last, cols:] = 0
            else:
                part_codes, last = part, first + len(part.codes)
                if places is not None:
                    assert part_codes.places is not None
                    places[:, first:last] = _place_words(part_codes.places, layout, cols)
                codes[first:last] = _stored_codes(part_codes.codes, layout)
                if layout.store == "int4" and layout.zero == "point":
                    _check_zero_points(tensor, part_codes.zeros)
                for table, numbers in ((scales, part_codes.scales), (zeros, part_codes.zeros)):
                    if table is not None:
                        assert numbers is not None
                        table[:, first:last] = _table(
                            numbers, _repeats(tensor, layout), groups, table
                        )
            first = last
        tensor.release()
    lookup = (
        torch.tensor(layout.lookup, dtype=torch.float32, device=DEVICE) if layout.lookup else None
    )
    order = (
        tensors[0].column_order if layout.scale else None
    )  # plain numbers are in the order of the matrix
    columns = None if order is None else torch.from_numpy(order.astype(np.int32)).to(DEVICE)
    return PackedWeight(
        layout=layout,
        rows=rows,
        cols=cols,
        codes=codes,
        scales=as_words(scales),
        zeros=as_words(zeros),
        lookup=lookup,
        column_order=columns,
        places=places,
    )


def _unpacked(
    tensor: StoredTensor, layout: WeightLayout, rows: NDArray[np.int64]
) -> CodeRows | NDArray[Any]:
    """Unpack rows for a layout. Plain numbers stay as they are stored, bf16 as int16."""
    if layout.scale is not None or layout.is_sparse:
        return code_rows(tensor, rows)
    dtype = _PLAIN_NUMBERS.get(tensor.format.name)
    if dtype is None:
        return tensor.dequantise_rows(rows)
    stored = rows if tensor.row_order is None else tensor.row_order[rows]
    return tensor.parts["codes"][stored].reshape(len(rows), -1).view(dtype)


def _check_zero_points(tensor: StoredTensor, zero_points: Any) -> None:
    if zero_points.max(initial=0) > _MAX_ZERO_POINT:
        raise UnsupportedModelError(
            f"tensor '{tensor.name}' has 4-bit zero points above {_MAX_ZERO_POINT}; "
            "convert it to another format"
        )


def pack_vector(tensor: StoredTensor) -> torch.Tensor:  # [cols]
    return torch.from_numpy(np.ascontiguousarray(tensor.dequantise().reshape(-1))).to(DEVICE)


def code_rows(tensor: StoredTensor, rows: NDArray[np.int64]) -> CodeRows:
    """Unpack the given rows of a quantised tensor."""
    form, parts, spec = tensor.format, tensor.parts, tensor.format.spec
    stored = rows if tensor.row_order is None else tensor.row_order[rows]
    assert spec
    if "row_scales" in parts:
        return CodeRows(
            parts["codes"][stored].reshape(len(rows), -1).view(np.int8),
            parts["row_scales"][stored][:, None],
            None,
        )
    if form.table_rows:
        part_codes = form.table_rows(parts, stored)
        codes: NDArray[Any] = part_codes.codes
        if part_codes.places is not None:
            check_places(part_codes.places, tensor.cols)
        if spec.codebook == "integer" and spec.zero == "none":
            codes = codes.astype(np.int16) - np.int16(1 << spec.bits - 1)
        zeros = None if part_codes.zeros is None else floats(part_codes.zeros, spec.zero_type)
        return CodeRows(codes, floats(part_codes.scales, spec.scale), zeros, part_codes.places)
    if form.split:
        blocks = np.ascontiguousarray(parts["codes"][stored])
        split, number = form.split(blocks.reshape(-1, form.nbytes)), len(rows)
        codes = split.codes.reshape(number, -1)
        if spec.codebook in CODEBOOKS and spec.code_cols == 1:
            codes = _codes_by_value(spec.codebook)[codes.view(np.uint8)]
        minima = None if split.minima is None else _by_rows(split.minima, number, spec)
        return CodeRows(codes, _by_rows(split.scales, number, spec), minima)
    return _mxfp4_rows(tensor, stored)


def _codes_by_value(codebook: Codebook) -> NDArray[np.uint8]:
    """Code of each integer of a codebook, by the integer's byte, [256]."""
    values = np.array(CODEBOOKS[codebook], np.int8)
    numbers = np.zeros(256, np.uint8)
    numbers[values.view(np.uint8)] = np.arange(len(values))
    return numbers


def _by_rows(scales: BlockScales, rows: int, spec: QuantSpec) -> NDArray[np.float32] | BlockScales:
    if not spec.super_block:
        return scales.numbers.reshape(rows, -1)
    return scales._replace(
        super_scales=scales.super_scales.reshape(rows, -1),
        sub_scales=scales.sub_scales.reshape(rows, -1),
    )


def _mxfp4_rows(tensor: StoredTensor, stored: NDArray[np.int64]) -> CodeRows:
    codes = tensor.parts["codes"][stored]
    if "block_scales" in tensor.parts:
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(stored), -1)
        return CodeRows(pairs, POWERS[tensor.parts["block_scales"][stored]], None)
    halves = np.concatenate([codes[:, :, 1:] & 15, codes[:, :, 1:] >> 4], axis=-1)
    return CodeRows(halves.reshape(len(stored), -1), POWERS[codes[:, :, 0]], None)


def _chunks(tensor: StoredTensor) -> Iterator[NDArray[np.int64]]:
    step = max(1, _CHUNK_CODES // tensor.cols)
    for first in range(0, tensor.rows, step):
        yield np.arange(first, min(first + step, tensor.rows))


def _repeats(tensor: StoredTensor, layout: WeightLayout) -> int:
    # groups of the layout per group of the file
    spec = tensor.format.spec
    return spec.group // layout.group if spec and layout.group else 1


def empty_table(
    layout: WeightLayout, number: ScaleStore | None, rows: int, cols: int
) -> torch.Tensor | None:
    """Memory for scales or zeros: [words of a row, rows], or [words of a row, rows, 2] in
    16 bits.
    """
    if number is None:
        return None
    shape = (layout.table_words(number, cols), rows)
    return torch.empty(
        (*shape, 2) if number in ("f16", "bf16") else shape, dtype=_TYPES[number], device=DEVICE
    )


def super_block_table(
    super_scales: torch.Tensor, sub_scales: torch.Tensor
) -> torch.Tensor:  # [words of a row, rows]
    """Table of float16 super-scales [rows, super-blocks] and int8 sub-scales [rows, groups]."""
    rows, blocks = super_scales.shape
    first = torch.nn.functional.pad(super_scales[:, :, None], (0, 1)).view(torch.int32)
    words = sub_scales.view(torch.int32).view(rows, blocks, -1)
    return torch.cat([first, words], dim=2).view(rows, -1).T


def as_words(table: torch.Tensor | None) -> torch.Tensor | None:
    """The table as kernels load it, with 16-bit pairs as 32-bit words."""
    return table if table is None or table.ndim == 2 else table.view(torch.int32)[:, :, 0]


def _padded(values: NDArray[Any], cols: int) -> torch.Tensor:
    return torch.nn.functional.pad(upload(values), (0, cols - values.shape[1]))


def _table(
    numbers: NDArray[np.float32] | BlockScales, repeats: int, groups: int, table: torch.Tensor
) -> torch.Tensor:
    # each number repeated `repeats` times, padded with 0
    if isinstance(numbers, BlockScales):
        super_scales = numbers.super_scales.astype(np.float16)
        sub_scales = np.ascontiguousarray(numbers.sub_scales)
        return super_block_table(upload(super_scales), upload(sub_scales))
    pairs = table.ndim == 3
    repeated = (
        _padded(np.repeat(numbers, repeats, axis=1)[:, :groups], len(table) * (1 + pairs))
        .to(table.dtype)
        .T
    )
    return repeated.reshape(len(table), 2, -1).transpose(1, 2) if pairs else repeated


def _place_words(places: NDArray[np.uint8], layout: WeightLayout, cols: int) -> torch.Tensor:
    # [words of a row, rows]
    return _padded(places, layout.padded_cols(cols) // 8).view(torch.int32).T


def _stored_codes(codes: NDArray[Any], layout: WeightLayout) -> torch.Tensor:
    # [rows, cols] padded to whole tiles
    if layout.is_sparse:
        return _stored_codes(codes, layout.kept)
    if layout.store == "bf16":
        return _padded(codes.view(np.int16), layout.padded_cols(codes.shape[1])).view(
            _TYPES["bf16"]
        )
    padded = _padded(
        codes,
        layout.padded_cols(codes.shape[1]),
    )
    if layout.store.startswith("int"):
        padded = padded.to(torch.int16)
    if layout.planes == 1:
        if layout.store == "int8":
            return (padded - layout.offset).to(torch.int8)
        return padded.view(_TYPES[layout.store])
    tiles = (padded - layout.offset).reshape(len(codes), -1, layout.planes, layout.part)
    if layout.store == "int8":
        tiles += 128
    bits = 16 // layout.planes
    words = tiles[:, :, 0]
    for plane in range(1, layout.planes):
        words = words | tiles[:, :, plane] << bits * plane
    return words.reshape(len(codes), -1)
