"""Paths of sessions whose KV the engine keeps (docs/use/sessions.md).

The prefix cache knows full blocks. A kept path also holds its last block, which is full in part,
and its blocks are evicted only when the engine parks the path. Paths that agree within a block
share it: of two tails, one of which begins the other, only the longer one has a block.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.kv.blocks import NULL_BLOCK
from headrace.kv.manager import KvManager, Tables
from headrace.kv.prefix import Node, edge_of, path_of

MAX_SHARE = 0.5
"""Max share of the blocks of a KV group that kept paths hold."""


@dataclass(eq=False, slots=True)
class KeptPath:
    name: str
    node: Node
    """Node of the last full block in the prefix cache."""
    tail: bytes
    """Token ids after the last full block, as `edge_of` gives them."""
    tables: Tables


class Tail:
    """Blocks of one group each, whose first tokens continue a path."""

    __slots__ = ("blocks", "tokens")

    def __init__(self, tokens: bytes, blocks: Sequence[int]) -> None:
        self.tokens = tokens
        self.blocks = blocks


class KeptPaths:
    """Kept paths by name, the least recently used first."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._paths = OrderedDict[str, KeptPath]()
        self._tails: dict[Node, list[KeptPath]] = {}  # by the node of their last full block
        self._children: dict[Node, Counter[Node]] = {}  # full blocks, with the paths through them
        self._edges: dict[Node, bytes] = {}  # tokens of the full blocks
        self._held: list[Counter[int]] = [Counter() for _ in kv.pools]  # paths of each block

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def tables(self) -> list[Tables]:
        return [path.tables for path in self._paths.values()]

    @property
    def num_blocks(self) -> int:
        """Blocks that kept paths hold, in all groups."""
        return sum(map(len, self._held))

    # Lookup

    def find(self, node: Node, tokens: Sequence[int]) -> tuple[Sequence[int], int]:
        """Return the block of each group that continues a path of full blocks, and its tokens.

        These are the longest common beginning with `tokens`, less than a block; no blocks and 0
        without any.
        """
        size = min(len(tokens), self._kv.block_size - 1)
        wanted = edge_of(tokens, 0, size)
        best: tuple[Sequence[int], int] = ((), 0)
        for tail in self._below(node):
            length = _common_tokens(tail.tokens, wanted)
            if length > best[1] and self._is_held(tail.blocks):
                best = tail.blocks, length
        return best

    def _is_held(self, blocks: Sequence[int]) -> bool:
        """Whether tables hold all blocks, so that a sequence which shares them must copy them, and
        all have their content: loads of a step come after its copies.
        """
        return all(
            block != NULL_BLOCK and pool.references[block] and not self._kv.is_loading(group, block)
            for group, (pool, block) in enumerate(zip(self._kv.pools, blocks, strict=True))
        )

    def _below(self, node: Node, but: KeptPath | None = None) -> Iterable[Tail]:
        """The blocks below a node, without that of the tail of `but`."""
        for path in self._tails.get(node, ()):
            if path is but:
                continue
            yield Tail(path.tail, [table[node.depth] for table in path.tables])
        for child in self._children.get(node, ()):
            yield Tail(self._edges[child], child.blocks)

    # Keeping

    def keep(self, name: str, node: Node, known: Sequence[int], tables: Tables) -> None:
        """Keep the KV of the tokens `known`, whose tables stay the caller's.

        `node` is that of their last full block. Parks the least recently used paths if all
        together hold too many blocks.
        """
        self.release([name])
        depth, size = node.depth, self._kv.block_size
        kept = KeptPath(name, node, edge_of(known, depth * size, size), self._kv.fork(tables))
        self._kv.trim(kept.tables, len(known))
        for group, table in enumerate(kept.tables):
            self._held[group].update(table.held)
        self._paths[name] = kept
        if kept.tail:
            self._tails.setdefault(node, []).append(kept)
            self._share_longest(kept)

        for child in path_of(node):
            assert child.parent is not None
            self._children.setdefault(child.parent, Counter())[child] += 1
            self._edges[child] = edge_of(known, child.parent.depth * size, size)
        for parent, edge in self._edges_of(kept):
            for other in self._tails.get(parent, ()):
                if edge.startswith(other.tail):
                    self._replace_last(other, [table[parent.depth] for table in kept.tables])
        while len(self._paths) > 1 and self._is_over_budget:
            self.park()

    def _edges_of(self, path: KeptPath) -> list[tuple[Node, bytes]]:
        """The tokens of each block of a path, with the node above it."""
        edges = [(child.parent, self._edges[child]) for child in path_of(path.node)]
        if path.tail:
            edges.append((path.node, path.tail))
        return [(parent, edge) for parent, edge in edges if parent is not None]

    def _share_longest(self, path: KeptPath) -> None:
        """Take the block of the longest other path, if its tokens begin with the tail."""
        longest: Tail | None = None
        for tail in self._below(path.node, path):
            is_longer = longest is None or len(tail.tokens) > len(longest.tokens)
            if is_longer and tail.tokens.startswith(path.tail) and self._is_held(tail.blocks):
                longest = tail
        if longest:
            self._replace_last(path, longest.blocks)

    def _replace_last(self, path: KeptPath, blocks: Sequence[int]) -> None:
        if NULL_BLOCK in blocks:  # a window has passed them
            return
        for group, (table, block) in enumerate(zip(path.tables, blocks, strict=True)):
            if table[-1] != block:
                self._subtract(group, [table[-1]])
                self._kv.pools[group].replace(table, len(table) - 1, block)
                self._held[group][block] += 1

    @property
    def _is_over_budget(self) -> bool:
        return any(
            pool.num_held_by(held) > MAX_SHARE * pool.num_blocks
            for pool, held in zip(self._kv.pools, self._held, strict=True)
        )

    # Releasing

    def park(self) -> None:
        """Release the least recently used path. The prefix cache keeps its full blocks, as long as
        nothing else needs them.
        """
        self.release([next(iter(self._paths))])

    def release(self, names: Iterable[str]) -> None:
        """Release paths; unknown names are ignored."""
        for name in names:
            if (path := self._paths.pop(name, None)) is not None:
                self._forget(path)

    def release_all(self, prefix: str) -> None:
        """Release all paths whose names begin with `prefix`."""
        self.release([name for name in self._paths if name.startswith(prefix)])

    def _forget(self, path: KeptPath) -> None:
        edges = self._edges_of(path)
        if path.tail:
            tails = self._tails[path.node]
            tails.remove(path)
            if not tails:
                del self._tails[path.node]
        for child in path_of(path.node):
            assert child.parent is not None
            children = self._children[child.parent]
            children[child] -= 1
            if not children[child]:
                del children[child], self._edges[child]
            if not children:
                del self._children[child.parent]

        # Paths that end within the blocks of this one share with another path from now on.
        for parent, _ in edges:
            for other in self._tails.get(parent, ()):
                if other.tables[0][-1] == path.tables[0][parent.depth]:
                    self._share_longest(other)
        for group, table in enumerate(path.tables):
            self._subtract(group, table.held)
        self._kv.free(path.tables)

    def _subtract(self, group: int, blocks: Iterable[int]) -> None:
        held = self._held[group]
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                del held[block]


def _common_tokens(a: bytes, b: bytes) -> int:
    """Number of equal tokens at the start of two lists of token ids, of 4 bytes each."""
    if a.startswith(b):
        return len(b) // 4
    if b.startswith(a):
        return len(a) // 4
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return first // 4
