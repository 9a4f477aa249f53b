"""Packs the matrices of a drafter in fewer bits than its file has.

A drafter reads all its weights for each token of a chain, so its bytes are the cost of a draft.
Rounding costs acceptance and never a token.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.drafter import Drafter
from headrace.config import DraftFormat
from headrace.quant.encode import encode
from headrace.quant.formats import FORMATS, StoredTensor

_CHUNK_VALUES = 1 << 20
_KEPT = ("embed",)
"""A step reads one row of it for each token."""


def with_format(drafter: Drafter, choice: DraftFormat) -> Drafter:
    """Encode matrices of 16 or 32 bits in blocks of GGUF's format `choice`, if it is not `file`.

    `mixed` is Q8_0 for the head, whose rounding changes the likeliest token, and Q4_1 for the
    others. A matrix stays as it is if its columns are not whole blocks, or if its file has fewer
    bits.
    """
    if choice == "file":
        return drafter
    name = "Q4_1" if choice == "mixed" else choice.upper()
    of_head = "Q8_0" if choice == "mixed" else name
    encoded: dict[str, StoredTensor] = {}
    for own in {name, of_head}:
        chosen = {
            key: tensor
            for key, tensor in drafter.tensors.items()
            if own == (of_head if key == "head" else name) and _can_encode(key, tensor, own)
        }
        encoded |= _encoded(chosen, own)
    return replace(drafter, tensors={**drafter.tensors, **encoded})


def _can_encode(key: str, tensor: StoredTensor, name: str) -> bool:
    if key in _KEPT or len(tensor.shape) != 2 or tensor.cols % FORMATS[name].block:
        return False
    return tensor.format.is_plain or tensor.format.is_bf16


def _encoded(tensors: Mapping[str, StoredTensor], name: str) -> dict[str, StoredTensor]:
    """The same matrices in a format, encoded on all cores in chunks of rows."""

    def blocks(part: tuple[StoredTensor, range]) -> NDArray[np.uint8]:
        tensor, rows = part
        return encode(name, tensor.dequantise_rows(rows))

    parts: list[tuple[StoredTensor, range]] = []
    for tensor in tensors.values():
        step = max(1, _CHUNK_VALUES // tensor.cols)
        parts += [
            (tensor, range(first, min(first + step, tensor.rows)))
            for first in range(0, tensor.rows, step)
        ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = list(zip(parts, threads.map(blocks, parts), strict=True))

    encoded: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        codes = np.concatenate([codes for (of, _), codes in results if of is tensor])
        encoded[key] = StoredTensor.from_bytes(tensor.name, FORMATS[name], tensor.shape, codes)
        tensor.release()
    return encoded
