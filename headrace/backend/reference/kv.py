"""Keys and values of the reference backend, and copies of their blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.program.kv import KvGroup

Floats = NDArray[np.float64]


class Store:
    """Keys and values of a group of layers, [layers, slots, heads, numbers]."""

    def __init__(self, group: KvGroup, num_slots: int) -> None:
        layout, shape = group.layout, (len(group.layers), num_slots, group.layout.num_heads)
        self.keys = np.zeros((*shape, layout.key_dim), np.float64)
        self.values = np.zeros((*shape, layout.value_dim), np.float64)

    def block_bytes(self, block_size: int) -> int:
        return block_size * (self.keys[:, 0].nbytes + self.values[:, 0].nbytes)


class ReferenceHostBlocks:
    """Copies of blocks beside the stores: the twin of what a device has in the host's memory. They
    cost no time to speak of.
    """

    block_seconds = 0.0

    def __init__(self, stores: Sequence[Store], num_blocks: Sequence[int], block_size: int) -> None:
        self.num_blocks, self.block_bytes = (
            tuple(num_blocks),
            tuple(store.block_bytes(block_size) for store in stores),
        )
        self._stores, self._size = stores, block_size
        self._copies: dict[tuple[int, int], list[Floats]] = {}  # by group and host block

    def save(self, group: int, block: int, host_block: int) -> None:
        self._copies[group, host_block] = [slots.copy() for slots in self._slots(group, block)]

    def load(self, group: int, host_block: int, block: int) -> None:
        for slots, copied in zip(
            self._slots(group, block), self._copies[group, host_block], strict=True
        ):
            slots[:] = copied

    def _slots(self, group: int, block: int) -> list[Floats]:
        store = self._stores[group]
        return [
            cache[:, block * self._size : (block + 1) * self._size]
            for cache in (store.keys, store.values)
        ]
