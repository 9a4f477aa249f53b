"""Keys and values of the reference backend."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.program.kv import KvGroup

Floats = NDArray[np.float64]


class Store:
    """Keys and values, each [layers, slots, heads, head size]."""

    def __init__(self, group: KvGroup, num_slots: int) -> None:
        layout = group.layout
        shape = (len(group.layers), num_slots, layout.num_heads)
        self.keys = np.zeros((*shape, layout.key_dim), np.float64)
        self.values = np.zeros((*shape, layout.value_dim), np.float64)

    def block_bytes(self, block_size: int) -> int:
        return block_size * (self.keys[:, 0].nbytes + self.values[:, 0].nbytes)


class ReferenceHostBlocks:
    """A host tier for tests, with the interface of the GPU tier; its copies take no time."""

    block_seconds = 0.0

    def __init__(self, stores: Sequence[Store], num_blocks: Sequence[int], block_size: int) -> None:
        self.num_blocks = tuple(num_blocks)
        self.block_bytes = tuple(store.block_bytes(block_size) for store in stores)
        self._stores = stores
        self._block_size = block_size
        self._copies: dict[tuple[int, int], list[Floats]] = {}  # by group and host block

    def save(self, group: int, block: int, host_block: int) -> None:
        self._copies[group, host_block] = [slots.copy() for slots in self._slots(group, block)]

    def load(self, group: int, host_block: int, block: int) -> None:
        copies = self._copies[group, host_block]
        for slots, copied in zip(self._slots(group, block), copies, strict=True):
            slots[:] = copied

    def _slots(self, group: int, block: int) -> list[Floats]:
        store, first = self._stores[group], block * self._block_size
        return [cache[:, first : first + self._block_size] for cache in (store.keys, store.values)]
