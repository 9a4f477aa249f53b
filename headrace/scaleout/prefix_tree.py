"""What the prefix caches of all replicas hold, as far as a router can know: one radix tree of token blocks.

An edge is the bytes of a whole block of token ids, compared token by token, so that a match is never a matter of luck. A root stands for
a scope: requests of two tenants, or of two adapters, share nothing. A node has the set of replicas that hold its block, as the bits of
one integer. A replica that holds a block holds those before it, so the sets shrink along a path, and one walk along a prompt finds how
much of it each of a thousand replicas has.

For each replica the blocks are in the order of their last use, a path from its end to its beginning. So the first is always one that no
other of that replica follows, and goes first when there are too many, as in the replica's own cache.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RequestError

Scope = tuple[str | None, str | None]
"""Within which prefixes are shared: salt of the tenant, name of the adapter."""

_ITEM_SIZE = array("i").itemsize


class Node:
    """A block of tokens behind those of its parent; or a scope, behind the one node that has no parent."""

    __slots__ = ("children", "edge", "holders", "parent")

    def __init__(self, parent: "Node | None", edge: bytes | Scope) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes | Scope, Node] = {}
        self.holders = 0
        """Bit i: the replica of number i holds the block. Always 0 in a scope."""


class PrefixTree:
    """Which replicas, named by small numbers, hold which blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._scopes = Node(None, b"")
        self._held: dict[int, OrderedDict[Node, None]] = {}
        """Of each replica, the least recently used first."""

    def num_held(self, replica: int) -> int:
        """Blocks that a replica holds."""
        return len(self._held.get(replica, ()))

    @property
    def num_nodes(self) -> int:
        """Blocks and scopes in the tree; a block that several replicas hold is there once."""
        nodes = list(self._scopes.children.values())
        for node in nodes:
            nodes += node.children.values()
        return len(nodes)

    def blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """The whole blocks of these tokens. Raises RequestError for what is no token id."""
        size = self.block_size * _ITEM_SIZE
        try:
            packed = array("i", tokens).tobytes()
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids must be whole numbers of 32 bits: {error}") from None
        return [packed[start : start + size] for start in range(0, len(packed) - size + 1, size)]

    def depths(self, blocks: Sequence[bytes], scope: Scope, num_replicas: int) -> NDArray[np.int64]:  # [num_replicas]
        """How many of the first of these blocks each replica holds."""
        holders: list[int] = []
        lengths: list[int] = []  # nodes one after the other that the same replicas hold
        node = self._scopes.children.get(scope)
        for edge in blocks:
            node = node and node.children.get(edge)
            if node is None:
                break
            if holders and holders[-1] == node.holders:
                lengths[-1] += 1
            else:
                holders.append(node.holders)
                lengths.append(1)
        if not holders:
            return np.zeros(num_replicas, np.int64)
        width = -(-num_replicas // 8)
        packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in holders), np.uint8).reshape(-1, width)
        bits = np.unpackbits(packed, axis=1, count=num_replicas, bitorder="little").astype(np.int64)
        depths: NDArray[np.int64] = np.array(lengths, np.int64) @ bits
        return depths

    def insert(self, replica: int, blocks: Sequence[bytes], scope: Scope, most: int) -> None:
        """A replica holds these blocks from now on, but never more than `most`: its least recently used give way."""
        held = self._held.setdefault(replica, OrderedDict())
        bit, node, path = 1 << replica, self._scopes, list[Node]()
        for edge in blocks[:most]:
            if not path:
                node = node.children.get(scope) or node.children.setdefault(scope, Node(node, scope))
            node = node.children.get(edge) or node.children.setdefault(edge, Node(node, edge))
            node.holders |= bit
            path.append(node)
        for node in reversed(path):
            held[node] = None
            held.move_to_end(node)
        while len(held) > most:
            self._let_go(replica, held.popitem(last=False)[0])

    def drop(self, replica: int) -> None:
        """A replica holds nothing any more."""
        for node in self._held.pop(replica, ()):
            self._let_go(replica, node)

    def _let_go(self, replica: int, node: Node) -> None:
        """A replica does not hold a block any more, nor any behind it. What no replica holds is not in the tree."""
        node.holders &= ~(1 << replica)
        while node.parent and not node.holders and not node.children:
            del node.parent.children[node.edge]
            node = node.parent
