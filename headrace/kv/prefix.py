"""The prefix cache: full blocks of KV under the tokens that they hold, for requests that begin alike.

A radix tree whose edges are whole blocks of token ids. A root stands for everything else that KV depends on and for the scope within
which it may be shared (`Scope`), and a node for the blocks of one stretch of tokens, one in each group of layers: its path spells all
tokens up to the end of that stretch, which is all that their KV depends on. Edges are compared token by token, so a hit is never a
matter of luck.

A node has a gap where the block of a group was evicted. A hit ends at a node before which no group has a gap among the blocks that
its rows see: all of them, or those that a window reaches and the sinks at the beginning. In a group that sees everything, a sequence
that holds a node's block holds those of its whole path, and releases them from the end; so of the evictable blocks there, the one least
recently used is always a leaf. The tree itself holds no block, and a node is there as long as a block of it is, a node below it, or a
sequence that has come so far.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple
from weakref import WeakValueDictionary

from headrace.kv.blocks import NULL_BLOCK, Table
from headrace.kv.manager import KvManager, Tables


class Scope(NamedTuple):
    """Within which KV may be shared. A pool belongs to one model, which needs no mention."""

    salt: str | None = None
    """Sets the requests of one tenant apart: how long a first token takes says nothing about the prompts of others."""
    adapter: str | None = None
    """Weights added to the model's own."""


class Node:
    """The blocks under some tokens, `NULL_BLOCK` in groups that have none any more, or a root, which has none at all."""

    __slots__ = ("__weakref__", "blocks", "depth", "parent")

    def __init__(self, parent: "Node | None", num_groups: int) -> None:
        self.parent = parent
        self.blocks = [NULL_BLOCK] * num_groups
        self.depth: int = parent.depth + 1 if parent else 0
        """Blocks from the root to here."""


class Hit(NamedTuple):
    """What the cache has of a sequence."""

    node: Node | None
    """The end of it; None: there is no cache."""
    blocks: list[list[int]]
    """Of each group."""
    length: int
    """Tokens."""


class PrefixCache:
    """The tree over the blocks of one manager."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._roots = WeakValueDictionary[Scope, Node]()
        self._children = WeakValueDictionary[tuple[Node, bytes], Node]()  # by parent and tokens
        self._nodes: list[dict[int, Node]] = [{} for _ in kv.pools]  # of each group, by block: these are what keeps a node
        self._forget: list[Callable[[int], None]] = [partial(self._evicted, group) for group in range(len(kv.pools))]

    def find(self, scope: Scope, known: Sequence[int], most: int) -> Node:
        """The node of the longest hit that spells a beginning of the first `most` known tokens; the scope's root if there is none."""
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = Node(None, len(self._nodes))
        size, reaches, sinks = (
            self._kv.block_size,
            [pool.reach for pool in self._kv.pools],
            [pool.num_sink_blocks for pool in self._kv.pools],
        )
        found, without_gap = node, [0] * len(reaches)
        for start in range(0, most - size + 1, size):
            child = self._children.get((node, _edge(known, start, size)))
            if child is None or any(child.depth <= num and block == NULL_BLOCK for num, block in zip(sinks, child.blocks, strict=True)):
                break
            node, is_hit = child, True
            for group, block in enumerate(node.blocks):
                without_gap[group] = without_gap[group] + 1 if block != NULL_BLOCK else 0
                is_hit = is_hit and without_gap[group] >= min(reaches[group], node.depth)
            if is_hit:
                found = node
        return found

    def blocks(self, node: Node) -> list[list[int]]:
        """The blocks of each group from the root to a node, null blocks where those behind it do not see them."""
        path: list[Node] = []
        at = node
        while at.parent:
            path.append(at)
            at = at.parent
        path.reverse()
        all_blocks = []
        for group, pool in enumerate(self._kv.pools):
            first = pool.first_seen(node.depth * self._kv.block_size)
            all_blocks.append([each.blocks[group] if not pool.num_sink_blocks <= i < first else NULL_BLOCK for i, each in enumerate(path)])
        return all_blocks

    def extend(self, node: Node, tables: Tables, known: Sequence[int], computed: int, *, exchange: bool = True) -> Node:
        """Put the full blocks of a sequence beyond `node` into the tree; returns the node of the last ones.

        Where the tree has a block of the same tokens, the sequence takes that one for its own, whose memory is free then; unless it
        may not `exchange` blocks now, because a launched step uses them.
        """
        size = self._kv.block_size
        while (node.depth + 1) * size <= computed:
            index = node.depth
            edge = _edge(known, index * size, size)
            child = self._children.get((node, edge))
            if child is None:
                child = self._children[node, edge] = Node(node, len(tables))
            for group, table in enumerate(tables):
                self._merge(child, group, table, index, exchange)
            node = child
        return node

    def _merge(self, node: Node, group: int, table: Table, index: int, exchange: bool) -> None:
        """Let a node and a table have the same block in a group, that of the node if it has one."""
        own, kept, pool = table[index], node.blocks[group], self._kv.pools[group]
        if own in (kept, NULL_BLOCK):
            return
        if kept == NULL_BLOCK:
            node.blocks[group] = own
            self._nodes[group][own] = node
            pool.retain(own, self._forget[group])
        elif exchange:
            pool.exchange(table, index, kept)

    def _evicted(self, group: int, block: int) -> None:
        """A block is gone. Without one of a group that sees everything no hit gets past the node, so its others are of no use."""
        pools, node = self._kv.pools, self._nodes[group].pop(block)
        node.blocks[group] = NULL_BLOCK
        for other, kept in enumerate(node.blocks):
            if kept != NULL_BLOCK and pools[group].reach == inf:
                pools[other].let_go(kept)
                del self._nodes[other][kept]
                node.blocks[other] = NULL_BLOCK


def _edge(known: Sequence[int], start: int, size: int) -> bytes:
    """Token ids as bytes: compared at once, and small."""
    return array("i", known[start : start + size]).tobytes()
