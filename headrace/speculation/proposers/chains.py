"""Chains of drafts, sampled with each sequence's own noise, one depth per launch."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log

import numpy as np
from numpy.typing import NDArray

from headrace.batch import DraftTree, Ints, RaggedBatch
from headrace.constraint import Constraint, Mask
from headrace.kv.manager import Tables
from headrace.kv.rows import TokenRun, batch_of_runs
from headrace.logit_ops import Expand, Expanded, SamplerState, StepResult
from headrace.proposer import SequenceView, always_pays

TIME_LIMIT = 10.0
"""Seconds of one call, which may catch up with a long prompt."""
_PROBABILITIES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Least probabilities of the classes from 2 on; class 0 is for a node without one."""
_SCORES = tuple(map(log, _PROBABILITIES))
ACCEPTANCE = (0.5, 0.02, 0.08, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
"""Assumed acceptance by class, before any is measured: a little below the probability."""

_ALWAYS = partial(always_pays, 0)


def confidence_class(score: float) -> int:
    """Class of a node, from 1, by the logarithm of its probability."""
    return 1 + bisect_right(_SCORES, score)


@dataclass(slots=True, eq=False)
class Chain:
    """Samples for one sequence, each with the next best tokens as siblings."""

    run: TokenRun
    seq_index: int
    sampler: SamplerState
    position: int
    budget: int
    probabilities: list[NDArray[np.float64]] | None
    """The distribution [vocab] that each node was sampled from."""
    constraint: Constraint | None = None
    mask: Mask | None = None
    """Allowed tokens below the end, if there is a constraint."""
    own_ids: Ints | None = None
    """The id of each token [vocab] in the model that drafts, or -1; None: it has the same ids."""
    pays: Callable[[Sequence[int]], bool] = _ALWAYS
    """Whether a draft goes on below nodes with these confidences."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidences: list[int] = field(default_factory=list)
    """The class of each node; 0 if the backend returns no scores."""
    end: int = -1
    """The last node; -1 before the first."""

    @property
    def draft(self) -> DraftTree:
        return DraftTree(
            self.tokens,
            self.parents,
            confidence=self.confidences if any(self.confidences) else 0,
            probabilities=np.array(self.probabilities) if self.probabilities else None,
        )

    @property
    def path(self) -> list[int]:
        return [self.tokens[node] for node in self._nodes()]

    def _nodes(self) -> list[int]:
        """The nodes from the root to the end."""
        nodes: list[int] = []
        node = self.end
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    @property
    def paths(self) -> list[list[int]]:
        """The tokens down to each leaf, first those that go deepest."""
        paths: list[list[int]] = []
        for parent, token in zip(self.parents, self.tokens, strict=True):
            paths.append([token] if parent < 0 else [*paths[parent], token])
        leaves = [node for node in range(len(paths)) if node not in self.parents]
        return sorted((paths[leaf] for leaf in leaves), key=len, reverse=True)

    @property
    def num_left(self) -> int:
        return self.budget - len(self.tokens)

    def expand(self, row: int, width: int) -> Expand:
        return Expand(
            row=row,
            position=self.position,
            sampler=self.sampler,
            seq_index=self.seq_index,
            width=min(width, self.num_left),
            probabilities=self.probabilities is not None,
            masks=None if self.mask is None else self.mask[None],
        )

    def grow(self, expanded: Expanded, width: int) -> None:
        """Add up to `width` allowed tokens below the end, and move the end to the first."""
        node = len(self.tokens)
        # Missing siblings reduce the budget, so that the chain does not become deeper instead.
        self.budget -= min(width, self.num_left) - len(expanded.tokens)
        self.tokens += expanded.tokens
        self.parents += [self.end] * len(expanded.tokens)
        scores = expanded.scores
        self.confidences += map(confidence_class, scores) if scores else [0] * len(expanded.tokens)
        if self.probabilities is not None and expanded.probabilities is not None:
            self.probabilities.append(expanded.probabilities)
        self.end = node
        self.position += 1
        if self.constraint is not None:
            self.mask = self.constraint.mask_after(self.path)
            if self.mask is None:  # the output ends here
                self.budget = len(self.tokens)
        token = self.tokens[node]
        if self.own_ids is not None:
            token = int(self.own_ids[token])
            if token < 0:  # the model that drafts cannot read the token
                self.budget = len(self.tokens)
        if self.num_left > 0 and not self.pays([self.confidences[i] for i in self._nodes()]):
            self.budget = len(self.tokens)
        self.run = TokenRun([token], self.run.computed + len(self.run.tokens), self.run.tables)


def chain(
    seq: SequenceView,
    computed: int,
    tables: Tables,
    budget: int,
    *,
    probabilities: bool,
    pays: Callable[[Sequence[int]], bool] = _ALWAYS,
) -> Chain:
    """An empty chain after `computed` tokens with KV in `tables`."""
    index = seq.seq_id[1]
    return Chain(
        run=TokenRun(seq.known[computed:], computed, tables),
        seq_index=index,
        sampler=seq.sampler.clone(index),
        position=len(seq.known),
        budget=budget,
        probabilities=[] if probabilities else None,
        constraint=seq.constraint,
        mask=None if seq.constraint is None else seq.constraint.mask,
        pays=pays,
    )


Launch = Callable[[RaggedBatch, Sequence[Expand], Sequence[Chain]], StepResult]
"""Runs a forward with one op for each chain."""


def grow(launch: Launch, chains: Sequence[Chain], width: int, block_size: int) -> None:
    """Extend the chains by `width` nodes per depth, until their budgets are spent.

    Logits that are not finite end a chain. The tables must have slots for all depths but the
    last.
    """
    while chains:
        batch = batch_of_runs([c.run for c in chains], block_size, logits=True)
        ops = [c.expand(row, width) for row, c in enumerate(chains)]
        values = launch(batch, ops, chains).values
        growing: list[Chain] = []
        for c, value in zip(chains, values, strict=True):
            if isinstance(value, Expanded):
                c.grow(value, width)
                if c.num_left > 0:
                    growing.append(c)
        chains = growing
