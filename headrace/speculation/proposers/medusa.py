"""Medusa heads draft from the hidden row of the last token (Cai et al. 2024).

Head i predicts the token i + 2 positions after its row, at depth i of a static tree of likely
combinations.
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
"""Probability that the likeliest token of the first head is right."""
_NEXT_HEAD = 0.8
"""Factor from one head to the next."""
_NEXT_RANK = 0.3
_SHARED_LOGITS = "medusa.head.weight"
"""Name of a matrix that gives the logits of all heads."""


def head_forward(index: int, dim: int, vocab: int, g: Tracer) -> Value:
    """Trace the logits of head `index` for each row x [dim].

    Each block adds silu(W x + b) to x, and a matrix gives the logits: the head's own, one of all
    heads, or the target's. `g` has the tensors that the head has.
    """
    # All rows are gathered, so the workspace is sized by logit rows and not by rows of a step.
    x = g.gather_rows(g.input(dim))
    name, block = f"medusa.{index}", 0
    while g.has(f"{name}.{block}.linear.weight"):
        linear = f"{name}.{block}.linear"
        bias = g.vector(f"{linear}.bias", dim) if g.has(f"{linear}.bias") else None
        mixed = g.linear(x, g.weight(f"{linear}.weight", dim, dim), bias)
        x = g.add(x, g.activate(mixed, "silu"))
        block += 1
    outputs = (f"{name}.{block}.weight", _SHARED_LOGITS, "head", "embed")
    return g.linear(x, g.weight(next(filter(g.has, outputs)), vocab, dim))


class _LastRow(NamedTuple):
    num_known: int  # known tokens of the sequence with the last token
    hidden: NDArray[np.float32]  # [dim]


class MedusaProposer:
    def __init__(self, heads: Sequence[Executable], depth: int, width: int) -> None:
        max_nodes = min(depth, len(heads)) * width
        self.traits = ProposerTraits(
            max_nodes, in_engine_thread=True, time_limit=TIME_LIMIT, needs_hidden=True
        )
        self._tree = static_tree(min(depth, len(heads)), max_nodes)
        self._heads = heads[: max(map(len, self._tree))]
        self._num_top = [
            1 + max(path[depth] for path in self._tree if len(path) > depth)
            for depth in range(len(self._heads))
        ]
        self._last_rows: WeakKeyDictionary[SequenceView, _LastRow] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        hidden: dict[int, NDArray[np.float32]] = {}
        for i, seq in enumerate(seqs):
            last = self._last_rows.get(seq)
            if last and last.num_known == len(seq.known):
                hidden[i] = last.hidden
        drafts = [NO_DRAFT] * len(seqs)
        if not hidden:
            return drafts
        batch = _input_rows(np.stack(list(hidden.values())))
        top_by_head = [
            _top_tokens(head, batch, count)
            for head, count in zip(self._heads, self._num_top, strict=True)
        ]
        for i, top in zip(hidden, zip(*top_by_head, strict=True), strict=True):
            if all(top):
                drafts[i] = self._draft(top, budgets[i])
        return drafts

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        if result.hidden is None:
            return
        seen = set[int]()
        for commit in commits:
            seq = seqs[commit.source]
            # The first commit of a source belongs to the sequence, further ones to its forks.
            if commit.tokens and commit.source not in seen:
                hidden = result.hidden[commit.last_row].copy()
                self._last_rows[seq] = _LastRow(len(seq.known), hidden)
            seen.add(commit.source)

    def _draft(self, top: Sequence[list[int]], budget: int) -> DraftTree:
        paths = self._tree[:budget]
        nodes = {path: node for node, path in enumerate(paths)}
        tokens = [top[len(path) - 1][path[-1]] for path in paths]
        return DraftTree(tokens, [nodes.get(path[:-1], -1) for path in paths])


def _top_tokens(head: Executable, batch: RaggedBatch, count: int) -> list[list[int]]:
    """The likeliest tokens for each row, best first; none for non-finite logits."""
    ops = [Score(row, token=0, num_logprobs=count) for row in range(len(batch.tokens))]
    values = head.launch(batch, ops).wait().values
    return [value.top_ids if isinstance(value, TokenLogprobs) else [] for value in values]


def static_tree(num_heads: int, num_nodes: int) -> list[tuple[int, ...]]:
    """The most probable paths of a tree, parents first, as ranks of tokens."""
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
    count = len(x)
    zeros, rows = ints([0] * count), ints(list(range(count)))
    return RaggedBatch(
        tokens=zeros,
        positions=zeros,
        row_start=ints(list(range(count + 1))),
        context_len=zeros,
        scheduled_len=ints([1] * count),
        kv=(),
        ancestors=None,
        logit_rows=rows,
        seq_of=rows,
        inputs=x,
    )
