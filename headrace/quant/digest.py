"""Digests of stored tensors, to compare the weights of processes.

Functions import hashlib and threads themselves, since a start without digests needs neither.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.quant.formats import StoredTensor

_CHUNK_BYTES = 4 << 20
_MIN_ROWS = 3


def tensors_digest(tensors: Mapping[str, StoredTensor], max_bytes: int = 0) -> str:
    """Hash the names, formats, shapes and content of tensors.

    Of a tensor above `max_bytes`, it reads that many bytes in evenly spaced rows, the first and
    last among them; 0: all. hashlib runs in threads.
    """
    from concurrent.futures import ThreadPoolExecutor
    from hashlib import blake2b

    ordered = dict(sorted(tensors.items()))
    with ThreadPoolExecutor() as pool:
        digests = pool.map(partial(_digest, max_bytes=max_bytes), ordered.values())
        total = blake2b(digest_size=16)
        for name, digest in zip(ordered, digests, strict=True):
            total.update(f"{name}\n".encode() + digest)
    return total.hexdigest()


def same_content(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors have the same format, shape and stored bytes, in the same order."""
    if (a.format.name, a.shape, a.parts.keys()) != (b.format.name, b.shape, b.parts.keys()):
        return False
    if not np.array_equal(
        np.arange(a.rows) if a.row_order is None else a.row_order,
        np.arange(b.rows) if b.row_order is None else b.row_order,
    ):
        return False
    return all(_same_array(part, b.parts[name]) for name, part in a.parts.items())


def _same_array(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Compare by chunks, so that unequal arrays are seldom read whole."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    chunks = zip(_row_chunks(np.atleast_1d(a), 0), _row_chunks(np.atleast_1d(b), 0), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in chunks)


def _digest(tensor: StoredTensor, max_bytes: int) -> bytes:
    from hashlib import blake2b

    digest = blake2b(f"{tensor.format.name} {tensor.shape}\n".encode(), digest_size=16)
    order = () if tensor.row_order is None else (tensor.row_order,)
    for part in (*tensor.parts.values(), *order):
        for rows in _row_chunks(np.atleast_1d(part), max_bytes):
            digest.update(np.ascontiguousarray(rows).view(np.uint8).data)
    return digest.digest()


def _row_chunks(part: NDArray[Any], max_bytes: int) -> Iterator[NDArray[Any]]:
    row_bytes = max(1, part.nbytes // max(1, len(part)))
    num_rows = max(_MIN_ROWS, max_bytes // row_bytes)
    if max_bytes and num_rows < len(part):
        for row in np.linspace(0, len(part) - 1, num_rows).astype(int):
            yield part[row : row + 1]
        return
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, len(part), step):
        yield part[start : start + step]
