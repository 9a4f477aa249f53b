"""Medusa heads (Cai et al. 2024): small extra heads draft, from the row that gave the last token,
those after the next.

Head i looks i + 2 tokens ahead of its row. The row has drawn one token by the time it is asked, so
head i gives depth i of the tree. What it takes to be likeliest, in every combination that may pay,
makes a static tree.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable
from headrace.batch import NO_DRAFT, Commit, DraftTree, RaggedBatch, TokenLogprobs, ints
from headrace.logit_ops import Score, StepResult
from headrace.program.op import Value
from headrace.program.trace import Tracer
from headrace.proposer import ProposerTraits, SequenceView
from headrace.speculation.proposers.chains import TIME_LIMIT

_FIRST = 0.6
"""Taken as the chance that a head's likeliest token is right, at the first head; each next head has
four fifths of it.
"""
_NEXT_HEAD = 0.8
_NEXT_RANK = 0.3
"""Taken as the chance of a token beside that of the next likelier one."""


def head_forward(index: int, dim: int, vocab: int, g: Tracer) -> Value:
    """The equations of a head: logits = W_out (x + silu(W x + b)) of each row x that the caller
    gives.
    """
    x = g.gather_rows(
        g.input(dim)
    )  # all of them; what follows is as long as what has logits, not as a step may be
    mixed = g.linear(
        x,
        g.weight(f"medusa.{index}.0.linear.weight", dim, dim),
        g.vector(f"medusa.{index}.0.linear.bias", dim),
    )
    return g.linear(
        g.add(x, g.activate(mixed, "silu")), g.weight(f"medusa.{index}.1.weight", vocab, dim)
    )


class _Kept(NamedTuple):
    """Of a sequence, from the step that drew its last token."""

    num_known: int
    hidden: NDArray[np.float32]  # [dim]


class MedusaProposer:
    """Drafts by heads that were trained for the model."""

    def __init__(self, heads: Sequence[Executable], depth: int, width: int) -> None:
        max_nodes = min(depth, len(heads)) * width
        self.traits = ProposerTraits(
            max_nodes, in_engine_thread=True, time_limit=TIME_LIMIT, needs_hidden=True
        )
        self._tree = static_tree(min(depth, len(heads)), max_nodes)
        self._heads = heads[: max(map(len, self._tree))]
        self._kept: WeakKeyDictionary[SequenceView, _Kept] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        kept = [self._kept.get(seq) for seq in seqs]
        asked = [
            i
            for i, (seq, k) in enumerate(zip(seqs, kept, strict=True))
            if k and k.num_known == len(seq.known)
        ]
        if not asked:
            return [NO_DRAFT] * len(seqs)
        batch = _input_rows(np.stack([k.hidden for i in asked if (k := kept[i])]))
        ranks = [
            1 + max(path[depth] for path in self._tree if len(path) > depth)
            for depth in range(len(self._heads))
        ]
        top = [
            _top_tokens(head, batch, most) for head, most in zip(self._heads, ranks, strict=True)
        ]
        drafts = [NO_DRAFT] * len(seqs)
        for row, i in enumerate(asked):
            if all(by_head[row] for by_head in top):
                drafts[i] = self._draft([by_head[row] for by_head in top], budgets[i])
        return drafts

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        if result.hidden is None:
            return
        seen = set[int]()
        for commit in commits:
            seq = seqs[commit.source]
            if (
                commit.tokens and commit.source not in seen
            ):  # the first of several goes to the sequence itself
                self._kept[seq] = _Kept(len(seq.known), result.hidden[commit.last_row].copy())
            seen.add(commit.source)

    def _draft(self, top: list[list[int]], budget: int) -> DraftTree:
        paths = self._tree[:budget]
        nodes = {path: node for node, path in enumerate(paths)}
        tokens = [top[len(path) - 1][path[-1]] for path in paths]
        return DraftTree(tokens, [nodes.get(path[:-1], -1) for path in paths])


def _top_tokens(head: Executable, batch: RaggedBatch, count: int) -> list[list[int]]:
    """The `count` likeliest tokens of a head for each row, best first; none where its logits are
    not finite.
    """
    values = (
        head.launch(batch, [Score(row, 0, count) for row in range(len(batch.tokens))]).wait().values
    )
    return [value.top_ids if isinstance(value, TokenLogprobs) else [] for value in values]


def static_tree(num_heads: int, num_nodes: int) -> list[tuple[int, ...]]:
    """The paths, as ranks from the root down, that are likeliest to be right; parents come before
    children.
    """
    tree: list[tuple[int, ...]] = []
    queue: list[tuple[float, tuple[int, ...]]] = [(-_FIRST, (0,))] if num_heads else []
    while queue and len(tree) < num_nodes:
        chance, path = heappop(queue)
        tree.append(path)
        heappush(queue, (chance * _NEXT_RANK, (*path[:-1], path[-1] + 1)))
        if len(path) < num_heads:
            heappush(queue, (chance * _FIRST * _NEXT_HEAD ** len(path), (*path, 0)))
    return tree


def _input_rows(x: NDArray[np.float32]) -> RaggedBatch:
    """A step of these rows, for a program that keeps nothing."""
    count = len(x)
    zeros, rows = ints([0] * count), ints(list(range(count)))
    row_start = ints(list(range(count + 1)))
    return RaggedBatch(
        zeros, zeros, row_start, zeros, ints([1] * count), (), None, rows, rows, inputs=x
    )
