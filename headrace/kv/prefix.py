"""The prefix cache: a radix tree of KV blocks (docs/internals/kv.md).

Its edges are whole blocks of token ids, compared token by token, never by a hash alone.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from headrace.kv.blocks import NULL_BLOCK, Table
from headrace.kv.manager import KvManager, Tables

if TYPE_CHECKING:
    from headrace.kv.disk import StoredBlock
    from headrace.kv.folder import Bytes


class Scope(NamedTuple):
    """The scope within which requests may share KV of one model."""

    salt: str | None = None
    """Separates tenants: the time to the first token reveals no prompts with another salt."""
    adapter: str | None = None


class Node:
    """The blocks of one stretch of tokens, one in each KV group, or the root of a scope.

    An evicted block without a host copy is a gap. A hit needs all blocks that later rows see: the
    whole path, or the window and the sinks.
    """

    __slots__ = ("__weakref__", "blocks", "depth", "edge", "host_blocks", "key", "parent")

    def __init__(
        self, parent: "Node | None", num_groups: int, edge: bytes = b"", key: bytes = b""
    ) -> None:
        self.parent = parent
        self.edge = edge
        """The token ids of the stretch."""
        self.key = key
        """Hash of the scope and of all tokens, for the disk tier; empty without one."""
        self.blocks = [NULL_BLOCK] * num_groups
        """Block of each group; `NULL_BLOCK` if evicted."""
        self.host_blocks = [NULL_BLOCK] * num_groups
        """Host copy in each group; `NULL_BLOCK` without a copy."""
        self.depth: int = parent.depth + 1 if parent else 0

    def has_kv(self, with_host: bool) -> list[bool]:
        """Whether each group has a block or, `with_host`, a host copy."""
        return [
            block != NULL_BLOCK or (with_host and host_block != NULL_BLOCK)
            for block, host_block in zip(self.blocks, self.host_blocks, strict=True)
        ]


class Hit(NamedTuple):
    node: Node | None
    blocks: list[list[int]]
    """Blocks of each group; null outside a window, or with only a host copy."""
    num_tokens: int
    tail: Sequence[int] = ()
    """Block of each group with the last tokens of the hit, if these do not fill a block. The
    sequence copies it before it writes to it.
    """


class PrefixCache:
    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._roots = WeakValueDictionary[Hashable, Node]()
        self._children = WeakValueDictionary[tuple[Node, bytes], Node]()  # by parent and tokens

        # The nodes of each group by block and by host block. These references keep a node alive.
        self._nodes: list[dict[int, Node]] = [{} for _ in kv.pools]
        self._host_nodes: list[dict[int, Node]] = [{} for _ in kv.pools]

        groups = range(len(kv.pools))
        self._on_evict: list[Callable[[int], None]] = [
            partial(self._evicted, group) for group in groups
        ]
        self._on_drop: list[Callable[[int], None]] = [
            partial(self._dropped, group) for group in groups
        ]

    def match(self, scope: Hashable, known: Sequence[int], max_tokens: int) -> Node:
        """The last node of the longest hit within `max_tokens` tokens, or the root of the scope."""
        node = self._root(scope)
        block_size, pools = self._kv.block_size, self._kv.pools
        with_host = self._kv.host.is_faster
        disk = self._kv.disk if self._kv.disk and self._kv.disk.is_faster else None
        num_without_gap = [0] * len(pools)  # blocks at the end of the path, for each group
        hit = node

        for start in range(0, max_tokens - block_size + 1, block_size):
            edge = edge_of(known, start, block_size)
            child = self._children.get((node, edge))
            if child is None and disk:
                child = self._new_child(node, edge)
            if child is None:
                break
            has_kv = child.has_kv(with_host)
            if disk and not all(has_kv):
                has_kv = [has or disk.has(child.key, group) for group, has in enumerate(has_kv)]
                if not any(has_kv):
                    break
            # All later rows see the sinks, so no longer hit exists after a gap there.
            if any(
                child.depth <= pool.num_sink_blocks and not has
                for pool, has in zip(pools, has_kv, strict=True)
            ):
                break

            node, is_hit = child, True
            for group, has in enumerate(has_kv):
                num_without_gap[group] = num_without_gap[group] + 1 if has else 0
                num_visible = min(pools[group].window_blocks, node.depth)
                is_hit = is_hit and num_without_gap[group] >= num_visible
            if is_hit:
                hit = node
        return hit

    def blocks(self, node: Node) -> list[list[int]]:
        """The blocks of each group on the path, null as in `Hit.blocks`."""
        path = path_of(node)
        group_blocks = []
        for group, pool in enumerate(self._kv.pools):
            first = pool.first_visible(node.depth * self._kv.block_size)
            blocks = [
                NULL_BLOCK if pool.num_sink_blocks <= i < first else path_node.blocks[group]
                for i, path_node in enumerate(path)
            ]
            group_blocks.append(blocks)
        return group_blocks

    def share(self, hit: Hit, tables: Tables) -> bool:
        """Fill empty tables with the blocks of a hit, and queue loads of copies.

        Returns False, and changes no table, if a block of the hit cannot be read from the disk. The
        next match finds a shorter hit.
        """
        if hit.node is None:
            return True
        path, host = path_of(hit.node), self._kv.host
        to_load = self._to_load(hit)
        contents = self._read(path, to_load)
        if contents is None:
            return False
        self._kv.share(tables, hit.blocks)
        if hit.tail:
            self._kv.share(tables, [[block] for block in hit.tail])

        # Pin all copies first, as allocating a block may evict others to the host. The last block
        # of the path is pinned first, so it becomes the least recently used.
        for group, i in reversed(to_load):
            if (group, i) not in contents:
                host.pin(group, path[i].host_blocks[group])
        for group, i in to_load:
            node, pool = path[i], self._kv.pools[group]
            block = pool.fill_null(tables[group], i)
            if (group, i) not in contents:
                host.queue_load(group, node.host_blocks[group], block)
            elif self._kv.disk:
                self._kv.disk.queue_load(group, block, contents[group, i])
            self._set_block(node, group, block)
        return True

    def read_ahead(self, hit: Hit) -> bool:
        """Read some blocks of a hit from the disk if it has more than a step should wait for.

        Returns whether it did. Then the next match finds these blocks in the KV memory.
        """
        disk, node = self._kv.disk, hit.node
        if disk is None or node is None:
            return False
        to_load = sorted(self._to_load(hit), key=lambda place: place[1])
        count = disk.num_of_slice([group for group, _ in to_load])
        if count == len(to_load):
            return False

        path, places = path_of(node), to_load[:count]
        contents = disk.read([_stored(path[i], group).label for group, i in places])
        if contents is None:  # the next match finds a shorter hit
            return True
        tables = self._kv.new_tables()
        self._kv.share(tables, hit.blocks)  # so that the loads do not evict them
        for (group, i), content in zip(places, contents, strict=True):
            block = self._kv.pools[group].fill_null(tables[group], i)
            disk.queue_load(group, block, content)
            self._set_block(path[i], group, block)
        self._kv.free(tables)  # the blocks stay, as evictable ones
        return True

    def _to_load(self, hit: Hit) -> list[tuple[int, int]]:
        """The visible blocks of a hit that no KV memory has: group, and index on the path."""
        to_load: list[tuple[int, int]] = []
        for group, (pool, blocks) in enumerate(zip(self._kv.pools, hit.blocks, strict=True)):
            invisible = range(pool.num_sink_blocks, pool.first_visible(hit.num_tokens))
            to_load += [
                (group, i)
                for i, block in enumerate(blocks)
                if block == NULL_BLOCK and i not in invisible
            ]
        return to_load

    def _read(
        self, path: Sequence[Node], to_load: Sequence[tuple[int, int]]
    ) -> "dict[tuple[int, int], Bytes] | None":
        """The contents of those blocks of a path, by group and index, that have no host copy.

        None if one cannot be read.
        """
        disk = self._kv.disk
        if disk is None or not path:
            return {}
        disk.use([node.key for node in path])
        places = [(g, i) for g, i in to_load if path[i].host_blocks[g] == NULL_BLOCK]
        if not places:
            return {}
        contents = disk.read([_stored(path[i], group).label for group, i in places])
        return None if contents is None else dict(zip(places, contents, strict=True))

    def insert(
        self,
        node: Node,
        tables: Tables,
        known: Sequence[int],
        computed: int,
        *,
        replace: bool = True,
    ) -> Node:
        """Insert full blocks below `node`, and return the last node.

        With `replace`, blocks of the same tokens in the tree replace them. A launched step that
        uses them forbids it.
        """
        block_size = self._kv.block_size
        while (node.depth + 1) * block_size <= computed:
            index = node.depth
            edge = edge_of(known, index * block_size, block_size)
            child = self._children.get((node, edge)) or self._new_child(node, edge)
            for group, table in enumerate(tables):
                self._merge(child, group, table, index, replace)
            node = child
        return node

    def _merge(self, node: Node, group: int, table: Table, index: int, replace: bool) -> None:
        table_block, node_block = table[index], node.blocks[group]
        if table_block in (node_block, NULL_BLOCK):
            return
        if node_block == NULL_BLOCK:
            self._set_block(node, group, table_block)
            if self._kv.disk:
                self._kv.disk.save(group, table_block, _stored(node, group))
        elif replace:
            self._kv.pools[group].replace(table, index, node_block)

    def _root(self, scope: Hashable) -> Node:
        node = self._roots.get(scope)
        if node is None:
            key = b""
            if self._kv.disk:
                assert isinstance(scope, Scope), "only the KV of a model goes to the disk"
                key = self._kv.disk.root_key(scope.salt, scope.adapter)
            node = self._roots[scope] = Node(None, len(self._nodes), key=key)
        return node

    def _new_child(self, node: Node, edge: bytes) -> Node:
        key = self._kv.disk.next_key(node.key, edge) if self._kv.disk else b""
        child = self._children[node, edge] = Node(node, len(self._nodes), edge, key)
        return child

    def _set_block(self, node: Node, group: int, block: int) -> None:
        node.blocks[group] = block
        self._nodes[group][block] = node
        self._kv.pools[group].cache(block, self._on_evict[group])

    def _evicted(self, group: int, block: int) -> None:
        """Save a block to the host and to the disk before it is overwritten."""
        if self._kv.disk:
            self._kv.disk.release(group, block)
        node, host = self._nodes[group].pop(block), self._kv.host
        node.blocks[group] = NULL_BLOCK
        host_block = node.host_blocks[group]
        if host_block != NULL_BLOCK:
            host.touch(group, host_block)
            return
        host_block = host.save(group, block, self._on_drop[group])
        if host_block == NULL_BLOCK:
            self._prune(node, group)
        else:
            node.host_blocks[group] = host_block
            self._host_nodes[group][host_block] = node

    def _dropped(self, group: int, host_block: int) -> None:
        node = self._host_nodes[group].pop(host_block)
        node.host_blocks[group] = NULL_BLOCK
        if node.blocks[group] == NULL_BLOCK:
            self._prune(node, group)

    def _prune(self, node: Node, group: int) -> None:
        """Free the other blocks of a node, if no hit can pass its gap."""
        pools = self._kv.pools
        if pools[group].window_blocks != inf:
            return
        for other, pool in enumerate(pools):
            block, host_block = node.blocks[other], node.host_blocks[other]
            if block != NULL_BLOCK:
                if self._kv.disk:
                    self._kv.disk.release(other, block)
                pool.uncache(block)
                del self._nodes[other][block]
                node.blocks[other] = NULL_BLOCK
            if host_block != NULL_BLOCK:
                self._kv.host.free(other, host_block)
                del self._host_nodes[other][host_block]
                node.host_blocks[other] = NULL_BLOCK


def _stored(node: Node, group: int) -> "StoredBlock":
    from headrace.kv.disk import StoredBlock
    from headrace.kv.folder import BlockLabel

    assert node.parent, "a root has no block"
    label = BlockLabel(node.key, node.parent.key, group, node.edge)
    return StoredBlock(label, node.parent.depth)


def path_of(node: Node) -> list[Node]:
    """Return the nodes from below the root to `node`."""
    path: list[Node] = []
    while node.parent:
        path.append(node)
        node = node.parent
    return path[::-1]


def edge_of(known: Sequence[int], start: int, block_size: int) -> bytes:
    """Token ids as bytes, which are small and fast to compare."""
    return array("i", known[start : start + block_size]).tobytes()
