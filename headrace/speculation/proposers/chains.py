"""Drafts by a model: it continues several sequences at once, one token each in a launch, with the
noise of their own draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable
from headrace.batch import NO_DRAFT, DraftTree
from headrace.constraint import Constraint
from headrace.kv.manager import Tables
from headrace.kv.rows import TokenRun, batch_of_runs
from headrace.logit_ops import Expand, Expanded, SamplerState
from headrace.proposer import SequenceView

TIME_LIMIT = 10.0
"""Seconds that a drafting model may take for one call before it is retired: a long prompt takes one
a while to catch up with.
"""


@dataclass(slots=True, eq=False)
class Chain:
    """What a drafting model makes of one sequence: a chain of its draws, each with the next best
    tokens as siblings.
    """

    run: TokenRun
    """The tokens to compute next."""
    seq_index: int
    """Which sequence of the request it is: that gives its noise."""
    sampler: SamplerState
    """Draws as the sequence will, from the drafting model's logits."""
    position: int
    """Of the next token."""
    budget: int
    """Draft nodes that it may have."""
    probabilities: list[NDArray[np.float64]] | None
    """Of each node, if they are wanted."""
    constraint: Constraint | None = None
    """What may follow; None: anything."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    end: int = -1
    """The node from which the chain goes on."""

    @property
    def draft(self) -> DraftTree:
        return DraftTree(
            self.tokens,
            self.parents,
            probabilities=np.array(self.probabilities) if self.probabilities else None,
        )

    @property
    def path(self) -> list[int]:
        """The tokens of the chain itself."""
        path: list[int] = []
        node = self.end
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    @property
    def num_left(self) -> int:
        """Nodes that it may still have."""
        return self.budget - len(self.tokens)

    def expand(self, row: int, width: int) -> Expand:
        """The op that gives its next depth by a row of logits."""
        wants = self.probabilities is not None
        masks = None if self.constraint is None else self.constraint.masks(NO_DRAFT)
        return Expand(
            row,
            self.position,
            self.sampler,
            self.seq_index,
            min(width, self.num_left),
            wants,
            masks,
        )

    def grow(self, expanded: Expanded, width: int) -> None:
        """Add these tokens, `width` or as many as there were to draw, below its end, and go on
        below the first.
        """
        node = len(self.tokens)
        self.budget -= min(width, self.num_left) - len(
            expanded.tokens
        )  # what is missing here makes the chain no deeper
        self.tokens += expanded.tokens
        self.parents += [self.end] * len(expanded.tokens)
        if self.probabilities is not None and expanded.probabilities is not None:
            self.probabilities.append(expanded.probabilities)
        self.end = node
        self.position += 1
        if self.constraint is not None:
            after = self.constraint.continuation(expanded.tokens[0])
            self.budget = self.budget if after else len(self.tokens)  # nothing follows
            self.constraint = after
        self.run = TokenRun(
            [self.tokens[node]], self.run.computed + len(self.run.tokens), self.run.tables
        )


def chain(
    seq: SequenceView, computed: int, tables: Tables, budget: int, *, probabilities: bool
) -> Chain:
    """A chain below a sequence of which the draft has KV for the first `computed` tokens, in
    `tables`.
    """
    run = TokenRun(seq.known[computed:], computed, tables)
    index = seq.seq_id[1]
    return Chain(
        run,
        index,
        seq.sampler.clone(index),
        len(seq.known),
        budget,
        [] if probabilities else None,
        seq.constraint,
    )


def grow(executable: Executable, chains: Sequence[Chain], width: int, block_size: int) -> None:
    """Continue the chains, `width` nodes at each depth, until each has as many as it may, or its
    logits are not finite.

    Their tables must have slots for all depths but the last.
    """
    while chains:
        batch = batch_of_runs([c.run for c in chains], block_size, logits=True)
        values = (
            executable.launch(batch, [c.expand(row, width) for row, c in enumerate(chains)])
            .wait()
            .values
        )
        pairs = [
            (c, value)
            for c, value in zip(chains, values, strict=True)
            if isinstance(value, Expanded)
        ]
        for c, value in pairs:
            c.grow(value, width)
        chains = [c for c, _ in pairs if c.num_left > 0]
