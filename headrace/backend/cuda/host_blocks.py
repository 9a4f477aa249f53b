"""KV blocks in pinned host memory, saved and loaded while the device runs steps.

The launch stream copies between a block and a staging block, a copy stream between
staging and host. Only the device waits. Each direction has its own staging blocks, so
saves never wait for loads.
"""

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.memory import device_errors
from headrace.backend.cuda.stream import Mark, Stream, host_tensor
from headrace.errors import MemoryLimitError

# Max bytes pinned at once. Pinning them takes about as long as a step.
_CHUNK_BYTES = 1 << 26
# Max staging bytes of one direction, unless two blocks need more: some milliseconds of
# PCIe
_STAGING_BYTES = 1 << 27
_MAX_STAGING_BLOCKS = 64  # per direction
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class CudaHostBlocks:
    """Host copies of KV blocks, `num_blocks` per group.

    Raises MemoryLimitError if the host cannot pin memory for the first blocks.
    """

    def __init__(
        self, stores: Sequence[KvStore], num_blocks: Sequence[int], stream: Stream
    ) -> None:
        self.num_blocks = tuple(num_blocks)
        self.block_bytes = tuple(store.block_bytes for store in stores)
        self._stream = stream
        self._in_chunk = [max(1, _CHUNK_BYTES // size) for size in self.block_bytes]  # blocks
        self._chunks: list[list[torch.Tensor]] = [[] for _ in stores]  # each [blocks, bytes]
        self._tensors = [_in_words(store) for store in stores]
        # mark after the last copy to (group, host block)
        self._saved: dict[tuple[int, int], Mark] = {}
        staging = torch.empty(
            2, *_staging_shape(self.block_bytes), dtype=torch.uint8, device=DEVICE
        )
        self._out, self._in = (
            deque(_Staging(whole, self._tensors, stream.mark()) for whole in half)
            for half in staging
        )
        self.block_seconds = self._measure_block_seconds()

    @device_errors
    def save(self, group: int, block: int, host_block: int) -> None:
        copy, staging = self._copy(group, host_block), self._out[0]
        self._stream.wait_for(staging.done)
        for part, tensor in zip(staging.parts[group], self._tensors[group], strict=True):
            self._stream.copy(part, tensor[:, block])
        after = [self._stream.mark()]
        if before := self._saved.get((group, host_block)):
            after.append(before)
        staging.done = self._saved[group, host_block] = self._stream.copy_overlapped(
            copy, staging.whole[: len(copy)], after
        )
        self._out.rotate(-1)

    @device_errors
    def load(self, group: int, host_block: int, block: int) -> None:
        copy, staging = self._copy(group, host_block), self._in[0]
        arrival = self._stream.copy_overlapped(
            staging.whole[: len(copy)], copy, [staging.done, self._saved[group, host_block]]
        )
        self._stream.wait_for(arrival)  # later saves to this host block then wait as well
        for part, tensor in zip(staging.parts[group], self._tensors[group], strict=True):
            self._stream.copy(tensor[:, block], part)
        staging.done = self._stream.mark()
        self._in.rotate(-1)

    def _copy(self, group: int, host_block: int) -> torch.Tensor:  # [bytes]
        # [bytes]. Raises MemoryError if the host cannot pin more.
        chunk, place = divmod(host_block, self._in_chunk[group])
        chunks, size = self._chunks[group], self.block_bytes[group]
        while len(chunks) <= chunk:
            count = min(
                self._in_chunk[group], self.num_blocks[group] - len(chunks) * self._in_chunk[group]
            )
            try:
                chunks.append(host_tensor(count * size, torch.uint8).view(count, size))
            except RuntimeError as error:
                raise MemoryError(f"the host cannot pin {count * size:,} more bytes") from error
        return chunks[chunk][place]

    def _measure_block_seconds(self) -> float:
        """Seconds to load one block of every group. The blocks keep their contents."""
        seconds = 0.0
        # The save pins memory, the first load warms up, and the second load counts.
        for copy in (self.save, self.load, self.load):
            started = perf_counter()
            try:
                for group in range(len(self.num_blocks)):
                    copy(group, 0, 0)
            except MemoryError as error:
                advice = "lower kv_offload_bytes, or raise the limit of locked memory (ulimit -l)"
                raise MemoryLimitError(f"{error} for KV blocks; {advice}") from None
            self._stream.mark().synchronize()
            seconds = perf_counter() - started
        return seconds


class _Staging:
    def __init__(self, whole: torch.Tensor, groups: Sequence[Sequence[Any]], done: Mark) -> None:
        self.whole, self.done = whole, done
        # By group and tensor: [layers, words]
        self.parts = [_parts(whole, tensors) for tensors in groups]


def staging_bytes(block_bytes: Sequence[int]) -> int:
    """Device bytes of all staging blocks."""
    count, size = _staging_shape(block_bytes)
    return 2 * count * size


def _staging_shape(block_bytes: Sequence[int]) -> tuple[int, int]:
    # blocks of one direction, and bytes of each, a multiple of the largest word
    size = -(-max(block_bytes) // 8) * 8
    return max(2, min(_MAX_STAGING_BLOCKS, _STAGING_BYTES // size)), size


def _in_words(store: KvStore) -> list[Any]:
    """Tensors of a store as [layers, blocks, words], largest words first, which keeps
    parts aligned.
    """
    numbers = [tensor.flatten(2).view(torch.uint8) for tensor in store.tensors]
    words = [
        x.view(next(word for word in _WORDS if x.shape[2] % word.itemsize == 0)) for x in numbers
    ]
    return sorted(words, key=lambda x: -x.element_size())


def _parts(whole: torch.Tensor, tensors: Sequence[Any]) -> list[Any]:
    """Consecutive views of `whole` that hold one block of each tensor."""
    sizes = [tensor[:, 0].nbytes for tensor in tensors]
    parts = whole[: sum(sizes)].split(sizes)
    return [
        part.view(tensor.dtype).view(tensor[:, 0].shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
