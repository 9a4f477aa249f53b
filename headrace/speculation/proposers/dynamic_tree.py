"""Draft trees that grow where the drafter is most confident (EAGLE-2: Li et al. 2024).

Each launch expands the `width` likeliest nodes of the last depth. The likeliest of all nodes make
the draft. The likelihood of a node is the product of the probabilities on the path to the node.

A launch computes the rows of the nodes that it expands, and those of their ancestors again: a row
sees drafts of its own launch only. The rows lie in the slots after the known tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.batch import DraftTree, RaggedBatch, ints
from headrace.kv.rows import TokenRun, batch_of_runs, kv_rows
from headrace.logit_ops import Expand, Expanded, StepResult
from headrace.proposer import SequenceView
from headrace.speculation.proposers.chains import confidence_class

_WORD_BITS = 64
_HALF = math.log(0.5)


@dataclass(slots=True, eq=False)
class GrowingTree:
    """A draft tree of one sequence, below the last token of `run`."""

    seq: SequenceView
    run: TokenRun
    budget: int
    """Max nodes of the draft, and max rows of a launch."""
    depth: int
    """Max depth."""
    pays: Callable[[Sequence[int]], bool]
    """Whether deeper drafts pay below a node, by the confidence classes on the path to the node."""
    root_row: Any = None
    """The drafter's own row at the last token of the run."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    confidences: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """Logarithm of the estimated probability of each node, with its ancestors."""
    rows: dict[int, Any] = field(default_factory=dict)
    """The drafter's own row at each expanded node."""
    expanding: list[int] = field(default_factory=lambda: [-1])
    """The nodes that the next launch expands; -1: the last token of the run."""

    @property
    def draft(self) -> DraftTree:
        """The likeliest nodes. A node is never likelier than its parent, which comes first."""
        order = sorted(range(len(self.tokens)), key=lambda node: -self.scores[node])
        kept = sorted(order[: self.budget])
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return DraftTree(
            tokens=[self.tokens[node] for node in kept],
            parents=[place[self.parents[node]] for node in kept],
            confidence=[self.confidences[node] for node in kept],
        )

    def path(self, node: int) -> list[int]:
        """The nodes from the root to a node."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def expand(self, node: int, row: int, width: int) -> Expand | None:
        """The op that drafts below a node from its logit row; None if the output ends there."""
        tokens = [self.tokens[each] for each in self.path(node)]
        masks = None
        if (constraint := self.seq.constraint) is not None:
            mask = constraint.mask_after(tokens) if tokens else constraint.mask
            if mask is None and tokens:
                return None
            masks = None if mask is None else mask[None]
        index = self.seq.seq_id[1]
        sampler = self.seq.sampler.clone(index)
        for token in tokens:
            sampler.append(token)
        return Expand(
            row=row,
            position=len(self.seq.known) + len(tokens),
            sampler=sampler,
            seq_index=index,
            width=min(width, self.budget),
            probabilities=False,
            masks=masks,
        )

    def add(self, parent: int, expanded: Expanded) -> list[int]:
        """Add the children of a node and return them."""
        first = len(self.tokens)
        above, depth = (self.scores[parent], self.depths[parent]) if parent >= 0 else (0.0, 0)
        for rank, token in enumerate(expanded.tokens):
            # A GPU returns no score of a token that it draws alone.
            known = expanded.scores[rank] if expanded.scores else None
            score = _HALF if known is None else min(known, 0.0)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(depth + 1)
            self.confidences.append(0 if known is None else confidence_class(known))
            self.scores.append(above + score)
        return list(range(first, len(self.tokens)))

    def choose(self, children: Sequence[int], width: int) -> None:
        """Choose the nodes to expand next: the likeliest of the last depth whose drafts pay."""
        self.expanding = []
        rows = set[int]()
        for node in sorted(children, key=lambda node: -self.scores[node])[:width]:
            path = self.path(node)
            if len(path) >= min(self.depth, self.budget) or len(rows.union(path)) > self.budget:
                continue
            if self.pays([self.confidences[each] for each in path]):
                rows.update(path)
                self.expanding.append(node)
        self.expanding.sort()


Launch = Callable[[RaggedBatch, Sequence[Expand], Sequence[GrowingTree]], StepResult]


def grow_trees(
    growing: Sequence[GrowingTree], width: int, block_size: int, first: Launch, later: Launch
) -> None:
    """Grow trees by one depth per launch, until their depths are reached or drafts do not pay.

    `first` launches the runs, and `later` the rows of `launched_nodes`. The tables must have slots
    for `budget` rows after the run. Logits that are not finite end a path.
    """
    trees = list(growing)
    batch: RaggedBatch | None = None
    while trees:
        if batch is None:
            batch = batch_of_runs([tree.run for tree in trees], block_size, logits=True)
            launch = first
        else:
            batch, launch = tree_batch(trees, block_size), later
        places = [(tree, node) for tree in trees for node in tree.expanding]
        expanded = [
            (tree, node, row, op)
            for row, (tree, node) in enumerate(places)
            if (op := tree.expand(node, row, width))
        ]
        result = launch(batch, [op for *_, op in expanded], trees)
        if result.hidden is not None:
            for (tree, node), row in zip(places, result.hidden.copy(), strict=True):
                if node < 0:
                    tree.root_row = row
                else:
                    tree.rows[node] = row

        children: dict[int, list[int]] = {}
        for (tree, node, _, _), value in zip(expanded, result.values, strict=True):
            if isinstance(value, Expanded):
                children.setdefault(id(tree), []).extend(tree.add(node, value))
        for tree in trees:
            tree.choose(children.get(id(tree), []), width)
        trees = [tree for tree in trees if tree.expanding]


def launched_nodes(tree: GrowingTree) -> list[int]:
    """The nodes with rows in the next launch: those to expand and their ancestors, ascending."""
    return sorted({each for node in tree.expanding for each in tree.path(node)})


def tree_batch(trees: Sequence[GrowingTree], block_size: int) -> RaggedBatch:
    """A batch of the nodes to expand, which have logits, and their ancestors."""
    nodes = [launched_nodes(tree) for tree in trees]
    contexts = [tree.run.computed + len(tree.run.tokens) for tree in trees]
    starts = np.cumsum([0, *map(len, nodes)]).tolist()
    bits = np.zeros((starts[-1], -(-max(map(len, nodes)) // _WORD_BITS)), np.uint64)
    tokens: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for tree, own, start, context in zip(trees, nodes, starts, contexts, strict=False):
        place = {node: i for i, node in enumerate(own)}
        for i, node in enumerate(own):
            if (parent := tree.parents[node]) >= 0:
                bits[start + i] = bits[start + place[parent]]
            bits[start + i, i // _WORD_BITS] |= np.uint64(1 << i % _WORD_BITS)
        tokens += [tree.tokens[node] for node in own]
        positions += [context + tree.depths[node] - 1 for node in own]
        logit_rows += [start + place[node] for node in tree.expanding]
    written = [range(c, c + len(own)) for c, own in zip(contexts, nodes, strict=True)]
    return RaggedBatch(
        tokens=ints(tokens),
        positions=ints(positions),
        row_start=ints(starts),
        context_len=ints(contexts),
        scheduled_len=ints([0] * len(trees)),
        kv=kv_rows([tree.run.tables for tree in trees], written, block_size),
        ancestors=bits,
        logit_rows=ints(logit_rows),
        seq_of=ints([i for i, tree in enumerate(trees) for _ in tree.expanding]),
    )
