"""The prefix cache: full blocks of KV under the tokens that they hold, for requests that begin alike.

A radix tree whose edges are whole blocks of token ids. A root stands for everything else that KV depends on and for who may
share it (`Scope`), and a node for one block: its path spells all tokens up to the block's end, which is all that its KV
depends on. Edges are compared token by token, so a hit is never a matter of luck. The tree itself holds no block. Whoever
holds a node's block holds those of its whole path, and releases them from the end; so of the evictable blocks, the
one least recently used is always a leaf, and the pool may evict it. (Where sequences release what no layer's window
reaches, it may have nodes below it. Nobody finds them any more, so they only grow old.)
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from headrace.kv.blocks import BlockPool, Table


class Scope(NamedTuple):
    """Within which KV may be shared. A pool belongs to one model, which needs no mention."""

    salt: str | None = None
    """Sets the requests of one tenant apart: how long a first token takes says nothing about the prompts of others."""
    adapter: str | None = None
    """Weights added to the model's own."""


class Node:
    """A full block in the tree, or a root, which has none."""

    __slots__ = ("__weakref__", "block", "children", "depth", "edge", "parent")

    def __init__(self, parent: "Node | None" = None, edge: bytes = b"", block: int = -1) -> None:
        self.parent = parent
        self.edge = edge
        self.block = block
        self.depth: int = parent.depth + 1 if parent else 0
        """Blocks from the root to here."""
        self.children: dict[bytes, Node] = {}

    def path(self) -> list[int]:
        """The blocks from the root to here."""
        node, blocks = self, []
        while node.parent:
            blocks.append(node.block)
            node = node.parent
        return blocks[::-1]


class PrefixCache:
    """The tree over the blocks of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots = WeakValueDictionary[Scope, Node]()  # a root lasts as long as a node below it, or a sequence at it
        self._nodes: dict[int, Node] = {}  # by block

    def find(self, scope: Scope, known: Sequence[int], most: int) -> Node:
        """The node of the longest path that spells a beginning of the first `most` known tokens; the scope's root if none does."""
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = Node()
        size = self._pool.block_size
        for start in range(0, most - size + 1, size):
            child = node.children.get(_edge(known, start, size))
            if child is None:
                break
            node = child
        return node

    def extend(self, node: Node, table: Table, known: Sequence[int], computed: int, *, exchange: bool = True) -> Node:
        """Put the full blocks of a sequence beyond `node` into the tree; returns the node of the last one.

        Where the tree has a block of the same tokens, the sequence takes that one for its own, whose memory is free then; or
        goes no further, if it may not `exchange` its blocks now.
        """
        size = self._pool.block_size
        while (node.depth + 1) * size <= computed:
            index = node.depth
            edge = _edge(known, index * size, size)
            child = node.children.get(edge)
            if child is None:
                child = node.children[edge] = self._nodes[table[index]] = Node(node, edge, table[index])
                self._pool.retain(child.block, self._forget)
            elif child.block != table[index]:
                if not exchange:
                    break
                self._pool.exchange(table, index, child.block)
            node = child
        return node

    def _forget(self, block: int) -> None:
        node = self._nodes.pop(block)
        assert node.parent, "a root has no block"
        del node.parent.children[node.edge]


def _edge(known: Sequence[int], start: int, size: int) -> bytes:
    """Token ids as bytes: compared at once, and small."""
    return array("i", known[start : start + size]).tobytes()
