"""The prefix cache: full blocks of KV under the tokens that they hold, for requests that begin
alike.

A radix tree whose edges are whole blocks of token ids. A root stands for everything else that KV
depends on and for the scope within which it may be shared (`Scope`), and a node for the blocks of
one stretch of tokens, one in each group of layers: its path spells all tokens up to the end of that
stretch, which is all that their KV depends on. Edges are compared token by token, so a hit is never
a matter of luck.

A node has a gap where the block of a group was evicted. A hit ends at a node before which no group
has a gap among the blocks that its rows see: all of them, or those that a window reaches and the
sinks at the beginning. In a group that sees everything, a sequence that holds a node's block holds
those of its whole path, and releases them from the end; so of the evictable blocks there, the one
least recently used is always a leaf. The tree itself holds no block, and a node is there as long as
a block of it is, a node below it, or a sequence that has come so far.

Where there is a host tier (`kv/host.py`), a block that is evicted leaves a copy in the host's
memory, and a gap there is only where neither is. A sequence that comes to such a node takes a block
for the copy, which is the node's from then on.
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
    """Sets the requests of one tenant apart: how long a first token takes says nothing about the
    prompts of others.
    """
    adapter: str | None = None
    """Weights added to the model's own."""


class Node:
    """The blocks under some tokens, `NULL_BLOCK` in groups that have none any more, or a root,
    which has none at all.
    """

    __slots__ = ("__weakref__", "blocks", "depth", "host_blocks", "parent")

    def __init__(self, parent: "Node | None", num_groups: int) -> None:
        self.parent = parent
        self.blocks = [NULL_BLOCK] * num_groups
        self.host_blocks = [NULL_BLOCK] * num_groups
        """Their copies in the host's memory, where there are some."""
        self.depth: int = parent.depth + 1 if parent else 0
        """Blocks from the root to here."""

    def has(self, with_host: bool) -> list[bool]:
        """Whether there is a block of each group, or a copy of it."""
        return [
            block != NULL_BLOCK or (with_host and copy != NULL_BLOCK)
            for block, copy in zip(self.blocks, self.host_blocks, strict=True)
        ]


class Hit(NamedTuple):
    """What the cache has of a sequence."""

    node: Node | None
    """The end of it; None: there is no cache."""
    blocks: list[list[int]]
    """Of each group; null blocks where a copy is in the host's memory alone, and where a window
    does not reach.
    """
    length: int
    """Tokens."""


class PrefixCache:
    """The tree over the blocks of one manager."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._roots = WeakValueDictionary[Scope, Node]()
        self._children = WeakValueDictionary[tuple[Node, bytes], Node]()  # by parent and tokens
        self._nodes: list[dict[int, Node]] = [
            {} for _ in kv.pools
        ]  # of each group, by block: these are what keeps a node
        self._host_nodes: list[dict[int, Node]] = [{} for _ in kv.pools]  # and these, by host block
        self._forget: list[Callable[[int], None]] = [
            partial(self._evicted, group) for group in range(len(kv.pools))
        ]
        self._forget_copy: list[Callable[[int], None]] = [
            partial(self._copy_is_gone, group) for group in range(len(kv.pools))
        ]

    def find(self, scope: Scope, known: Sequence[int], most: int) -> Node:
        """The node of the longest hit that spells a beginning of the first `most` known tokens; the
        scope's root if there is none.
        """
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = Node(None, len(self._nodes))
        size, reaches, sinks = (
            self._kv.block_size,
            [pool.reach for pool in self._kv.pools],
            [pool.num_sink_blocks for pool in self._kv.pools],
        )
        found, without_gap, with_host = node, [0] * len(reaches), self._kv.host.is_quicker
        for start in range(0, most - size + 1, size):
            child = self._children.get((node, _edge(known, start, size)))
            if child is None:
                break
            there = child.has(with_host)
            if any(child.depth <= num and not has for num, has in zip(sinks, there, strict=True)):
                break
            node, is_hit = child, True
            for group, has in enumerate(there):
                without_gap[group] = without_gap[group] + 1 if has else 0
                is_hit = is_hit and without_gap[group] >= min(reaches[group], node.depth)
            if is_hit:
                found = node
        return found

    def blocks(self, node: Node) -> list[list[int]]:
        """The blocks of each group from the root to a node, null blocks where those behind it do
        not see them, or there is only a copy.
        """
        path, all_blocks = _path(node), []
        for group, pool in enumerate(self._kv.pools):
            first = pool.first_seen(node.depth * self._kv.block_size)
            all_blocks.append(
                [
                    each.blocks[group] if not pool.num_sink_blocks <= i < first else NULL_BLOCK
                    for i, each in enumerate(path)
                ]
            )
        return all_blocks

    def share(self, hit: Hit, tables: Tables) -> None:
        """Begin the tables of a sequence with what was found; what the host alone has is to be
        copied back (`HostTier.load_blocks`).
        """
        if hit.node is None:
            return
        self._kv.share(tables, hit.blocks)
        path, absent = _path(hit.node), list[tuple[int, int]]()
        for group, (pool, blocks) in enumerate(zip(self._kv.pools, hit.blocks, strict=True)):
            unseen = range(pool.num_sink_blocks, pool.first_seen(hit.length))
            absent += [
                (group, i)
                for i, block in enumerate(blocks)
                if block == NULL_BLOCK and i not in unseen
            ]
        for group, i in reversed(absent):  # the end of a path goes first
            self._kv.host.want(group, path[i].host_blocks[group])
        for group, i in absent:
            node, pool = path[i], self._kv.pools[group]
            block = pool.fill(tables[group], i)
            self._kv.host.load(group, node.host_blocks[group], block)
            self._keep(node, group, block)

    def extend(
        self,
        node: Node,
        tables: Tables,
        known: Sequence[int],
        computed: int,
        *,
        exchange: bool = True,
    ) -> Node:
        """Put the full blocks of a sequence beyond `node` into the tree; returns the node of the
        last ones.

        Where the tree has a block of the same tokens, the sequence takes that one for its own,
        whose memory is free then; unless it may not `exchange` blocks now, because a launched step
        uses them.
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
            self._keep(node, group, own)
        elif exchange:
            pool.exchange(table, index, kept)

    def _keep(self, node: Node, group: int, block: int) -> None:
        """Let a node have a block, which a sequence holds."""
        node.blocks[group] = block
        self._nodes[group][block] = node
        self._kv.pools[group].retain(block, self._forget[group])

    def _evicted(self, group: int, block: int) -> None:
        """A block is about to be written anew: what it holds goes to the host's memory, unless it
        is there already.
        """
        node, host = self._nodes[group].pop(block), self._kv.host
        node.blocks[group] = NULL_BLOCK
        if (copy := node.host_blocks[group]) != NULL_BLOCK:
            host.touch(group, copy)
        elif (copy := host.save(group, block, self._forget_copy[group])) != NULL_BLOCK:
            node.host_blocks[group] = copy
            self._host_nodes[group][copy] = node
        else:
            self._has_gap(node, group)

    def _copy_is_gone(self, group: int, host_block: int) -> None:
        """A host block holds another copy from now on."""
        node = self._host_nodes[group].pop(host_block)
        node.host_blocks[group] = NULL_BLOCK
        if node.blocks[group] == NULL_BLOCK:
            self._has_gap(node, group)

    def _has_gap(self, node: Node, group: int) -> None:
        """Without a block of a group that sees everything no hit gets past the node, so its others
        are of no use.
        """
        pools = self._kv.pools
        for other in range(len(pools)) if pools[group].reach == inf else ():
            if (kept := node.blocks[other]) != NULL_BLOCK:
                pools[other].let_go(kept)
                del self._nodes[other][kept]
                node.blocks[other] = NULL_BLOCK
            if (copy := node.host_blocks[other]) != NULL_BLOCK:
                self._kv.host.let_go(other, copy)
                del self._host_nodes[other][copy]
                node.host_blocks[other] = NULL_BLOCK


def _path(node: Node) -> list[Node]:
    """The nodes from the first below the root to this one."""
    path: list[Node] = []
    while node.parent:
        path.append(node)
        node = node.parent
    return path[::-1]


def _edge(known: Sequence[int], start: int, size: int) -> bytes:
    """Token ids as bytes: compared at once, and small."""
    return array("i", known[start : start + size]).tobytes()
