"""Copies of blocks of KV in pinned memory of the host, made and copied back in the order of the device's stream.

A copy is a part of the same stream as the steps, so no step reads a block before it is there, or writes one before its copy is made, and
the host waits for neither. The device does not compute meanwhile: a block takes a small part of the time in which it would be computed,
and an own stream for copies would take memory of the device for what is on its way.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.stream import Stream, host_tensor

_CHUNK_BYTES = 1 << 26
"""Most bytes that are pinned at once; which takes about as long as a step, so not much more."""


class CudaHostBlocks:
    """So many blocks of each group. Raises MemoryError where the host does not give the memory for one."""

    def __init__(self, stores: Sequence[KvStore], num_blocks: Sequence[int], stream: Stream) -> None:
        self.num_blocks = tuple(num_blocks)
        self.block_bytes = tuple(store.block_bytes for store in stores)
        self._stores, self._stream = stores, stream
        self._in_chunk = [max(1, _CHUNK_BYTES // size) for size in self.block_bytes]  # blocks
        self._chunks: list[list[list[Any]]] = [[] for _ in stores]
        """Of each group: chunks, which have [blocks, layers, heads, tokens, numbers] for each tensor of the store."""
        self.block_seconds = self._measured()

    def save(self, group: int, block: int, host_block: int) -> None:
        for copy, tensor in self._pairs(group, host_block):
            self._stream.copy(copy, tensor[:, block])

    def load(self, group: int, host_block: int, block: int) -> None:
        for copy, tensor in self._pairs(group, host_block):
            self._stream.copy(tensor[:, block], copy)

    def _pairs(self, group: int, host_block: int) -> list[tuple[Any, Any]]:
        """Where the host keeps a block, and the tensor of the device, for each tensor of a group."""
        chunk, place = divmod(host_block, self._in_chunk[group])
        chunks, store = self._chunks[group], self._stores[group]
        while len(chunks) <= chunk:
            size = min(self._in_chunk[group], self.num_blocks[group] - len(chunks) * self._in_chunk[group])
            chunks.append(_pinned(store, size))
        return [(copies[place], tensor) for copies, tensor in zip(chunks[chunk], store.tensors, strict=True)]

    def _measured(self) -> float:
        """Seconds that a block of every group takes to come back; the first blocks are what they were afterwards."""
        took = 0.0
        for copy in (self.save, self.load, self.load):  # the first of which pins memory, and the second warms up
            begun = perf_counter()
            for group in range(len(self._stores)):
                copy(group, 0, 0)
            self._stream.mark().synchronize()
            took = perf_counter() - begun
        return took


def _pinned(store: KvStore, num_blocks: int) -> list[Any]:
    """Memory of the host for so many blocks: for each tensor of a store, the largest numbers first, so that all lie as these must."""
    tensors = store.tensors
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    sizes = [num_blocks * tensors[i][:, 0].nbytes for i in order]
    try:
        whole = host_tensor(sum(sizes), torch.uint8)
    except RuntimeError as error:
        raise MemoryError(f"the host does not pin {sum(sizes):,} bytes more") from error
    parts = dict(zip(order, whole.split(sizes), strict=True))
    return [parts[i].view(x.dtype).view(num_blocks, *x[:, 0].shape) for i, x in enumerate(tensors)]
