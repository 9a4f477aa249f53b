"""What the prefix caches of all replicas hold, as far as a router can know: one radix tree of token
blocks.

A node is a block of tokens behind those of its parent, and is found by both: the name of its parent
and the bytes of the block's token ids, which are compared one by one, so that a match is never a
matter of luck. The first block of a prompt has a scope for a parent: requests of two tenants, or of
two adapters, share nothing. A node has the set of the replicas that hold its block, as the bits of
one integer. A replica that holds a block holds those before it, so these sets shrink along a path,
and one walk along a prompt finds how much of it each of a thousand replicas has.

For each replica the blocks are in the order of their last use, a path from its end to its
beginning. So the first is always one that no other of that replica follows, and goes first when
there are too many, as in the replica's own cache.

All is kept in a few dicts of bytes and integers, which Python's garbage collector does not walk
through: a million objects that point at each other would let requests wait for a tenth of a second
now and then.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from json import dumps

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RequestError

Scope = tuple[str | None, str | None]
"""Within which prefixes are shared: salt of the tenant, name of the adapter."""

_TOKEN_BYTES = array("i").itemsize


class PrefixTree:
    """Which replicas, named by small numbers, hold which blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._nodes: dict[bytes, bytes] = {}
        """Names of nodes by parent and block: what stands for a node as the parent of others."""
        self._keys: dict[bytes, bytes] = {}
        """The same the other way round."""
        self._holders: dict[bytes, int] = {}
        """Of each node; bit i: the replica of number i holds it."""
        self._held: dict[int, OrderedDict[bytes, None]] = {}
        """Of each replica, the least recently used first."""
        self._numbers = count()

    def __len__(self) -> int:
        """Nodes: a block that several replicas hold is there once."""
        return len(self._nodes)

    def num_held(self, replica: int) -> int:
        """Blocks that a replica holds."""
        return len(self._held.get(replica, ()))

    def blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """The whole blocks of these tokens. Raises RequestError for what is no token id."""
        size = self.block_size * _TOKEN_BYTES
        try:
            packed = array("i", tokens).tobytes()
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids must be whole numbers of 32 bits: {error}") from None
        return [packed[start : start + size] for start in range(0, len(packed) - size + 1, size)]

    def find(self, blocks: Sequence[bytes], scope: Scope) -> list[bytes]:
        """The nodes of the first of these blocks, as far as any replica holds them."""
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
        """How many of the first nodes of a path each replica holds."""
        holders: list[int] = []
        lengths: list[int] = []  # of stretches of the path that the same replicas hold
        for own in map(self._holders.__getitem__, path):
            if holders and holders[-1] == own:
                lengths[-1] += 1
            else:
                holders.append(own)
                lengths.append(1)
        if not holders:
            return np.zeros(num_replicas, np.int64)
        width = -(-num_replicas // 8)
        packed = np.frombuffer(
            b"".join(bits.to_bytes(width, "little") for bits in holders), np.uint8
        ).reshape(-1, width)
        bits = np.unpackbits(packed, axis=1, count=num_replicas, bitorder="little").astype(np.int64)
        depths: NDArray[np.int64] = np.array(lengths, np.int64) @ bits
        return depths

    def insert(
        self,
        replica: int,
        blocks: Sequence[bytes],
        scope: Scope,
        most: int,
        found: Sequence[bytes] = (),
    ) -> None:
        """A replica holds these blocks from now on, but never more than `most`: its least recently
        used give way.

        `found`: the nodes of the first of them, where `find` has just given these.
        """
        path = list(found[:most])
        parent = path[-1] if path else _root(scope)
        for block in blocks[len(path) : most]:
            key = parent + block
            node = self._nodes.get(key)
            if node is None:
                node = b"n" + next(self._numbers).to_bytes(8, "little")
                self._nodes[key], self._keys[node], self._holders[node] = node, key, 0
            path.append(node)
            parent = node
        bit, holders, held = (
            1 << replica,
            self._holders,
            self._held.setdefault(replica, OrderedDict()),
        )
        for node in reversed(path):
            if node in held:
                held.move_to_end(node)
            else:
                held[node] = None
                holders[node] |= bit
        while len(held) > most:
            self._let_go(replica, held.popitem(last=False)[0])

    def drop(self, replica: int) -> None:
        """A replica holds nothing any more."""
        for node in self._held.pop(replica, ()):
            self._let_go(replica, node)

    def _let_go(self, replica: int, node: bytes) -> None:
        """A replica does not hold a node any more, nor any behind it. What none holds is not in the
        tree.
        """
        holders = self._holders[node] ^ 1 << replica
        if holders:
            self._holders[node] = holders
        else:
            del self._holders[node], self._nodes[self._keys.pop(node)]


def _root(scope: Scope) -> bytes:
    """What stands for a scope as a parent. It begins unlike a node, and as blocks are of one size,
    no two keys are alike by chance.
    """
    return b"s" + dumps(scope).encode()
