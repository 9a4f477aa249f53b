"""Predicted prefix caches of all replicas: one radix tree of token blocks.

Nodes compare token ids exactly. First blocks have a scope as parent, so tenants and adapters
share no node. A replica that holds a block holds all blocks before it.

The tree is dicts of bytes and integers: linked objects would slow the garbage collector.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from json import dumps

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RequestError

CacheScope = tuple[str | None, str | None]
"""Cache salt and adapter: only equal scopes share prefixes."""

_TOKEN_BYTES = array("i").itemsize


class PrefixTree:
    """Blocks of `block_size` tokens that each replica holds."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._nodes: dict[bytes, bytes] = {}
        """Name of each node by its key: the name of its parent, then the block."""
        self._keys: dict[bytes, bytes] = {}
        self._holders: dict[bytes, int] = {}
        """Bit i of a node: replica i holds it."""
        self._held: dict[int, OrderedDict[bytes, None]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._nodes)

    def num_held(self, replica: int) -> int:
        return len(self._held.get(replica, ()))

    def blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """Split tokens into full blocks. Raises RequestError for an invalid token id."""
        size = self.block_size * _TOKEN_BYTES
        try:
            packed = array("i", tokens).tobytes()
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids must be 32-bit integers: {error}") from None
        return [packed[start : start + size] for start in range(0, len(packed) - size + 1, size)]

    def find(self, blocks: Sequence[bytes], scope: CacheScope) -> list[bytes]:
        parent, path = _root(scope), list[bytes]()
        for block in blocks:
            node = self._nodes.get(parent + block)
            if node is None:
                break
            path.append(node)
            parent = node
        return path

    def depths(
        self, path: Sequence[bytes], num_replicas: int
    ) -> NDArray[np.int64]:  # [num_replicas]
        holders: list[int] = []
        lengths: list[int] = []  # of parts of the path with equal holders
        for bits in map(self._holders.__getitem__, path):
            if holders and holders[-1] == bits:
                lengths[-1] += 1
            else:
                holders.append(bits)
                lengths.append(1)
        if not holders:
            return np.zeros(num_replicas, np.int64)
        num_bytes = -(-num_replicas // 8)
        packed = b"".join(bits.to_bytes(num_bytes, "little") for bits in holders)
        rows = np.frombuffer(packed, np.uint8).reshape(-1, num_bytes)
        is_held = np.unpackbits(rows, axis=1, count=num_replicas, bitorder="little")
        depths: NDArray[np.int64] = np.array(lengths, np.int64) @ is_held.astype(np.int64)
        return depths

    def insert(
        self,
        replica: int,
        blocks: Sequence[bytes],
        scope: CacheScope,
        max_blocks: int,
        known_path: Sequence[bytes] = (),
    ) -> None:
        """Add blocks, and evict the least recently used above `max_blocks`.

        `known_path`: result of a `find` just before.
        """
        path = list(known_path[:max_blocks])
        parent = path[-1] if path else _root(scope)
        for block in blocks[len(path) : max_blocks]:
            key = parent + block
            node = self._nodes.get(key)
            if node is None:
                node = b"n" + next(self._numbers).to_bytes(8, "little")
                self._nodes[key] = node
                self._keys[node] = key
                self._holders[node] = 0
            path.append(node)
            parent = node

        bit, holders = 1 << replica, self._holders
        held = self._held.setdefault(replica, OrderedDict())
        for node in reversed(path):
            if node in held:
                held.move_to_end(node)
            else:
                held[node] = None
                holders[node] |= bit
        while len(held) > max_blocks:
            self._release(replica, held.popitem(last=False)[0])

    def drop(self, replica: int) -> None:
        for node in self._held.pop(replica, ()):
            self._release(replica, node)

    def _release(self, replica: int, node: bytes) -> None:
        holders = self._holders[node] ^ 1 << replica
        if holders:
            self._holders[node] = holders
        else:
            del self._holders[node], self._nodes[self._keys.pop(node)]


def _root(scope: CacheScope) -> bytes:
    return b"s" + dumps(scope).encode()
