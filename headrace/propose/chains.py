"""Guesses from a model: it continues several branches at once, one token each in a run, with the noise of their own draws."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace._native import Sampler, draw_all
from headrace.backend import Executable
from headrace.batch import BranchView, Guess
from headrace.kv.blocks import Table
from headrace.kv.rows import Run, forced_rows


@dataclass(slots=True, eq=False)
class Chain:
    """What a drafting model makes of one branch: a chain of its draws, each beside the next likeliest tokens in its place."""

    run: Run
    """What is to be computed next."""
    branch: int
    """The index that gives its noise."""
    sampler: Sampler
    """Draws as the branch will, from what the draft thinks of it."""
    position: int
    """Of the next token."""
    room: int
    """Guess nodes that it may have."""
    width: int
    """Nodes at each depth."""
    probabilities: list[NDArray[np.float64]] | None
    """Of each node, if they are wanted."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    end: int = -1
    """The node from which the chain goes on."""

    @property
    def guess(self) -> Guess:
        return Guess(self.tokens, self.parents, np.array(self.probabilities) if self.probabilities else None)

    def add(self, token: int, parent: int) -> None:
        """A node more."""
        self.tokens.append(token)
        self.parents.append(parent)

    def advance(self, token: int) -> None:
        """Go on below the token that was drawn last."""
        self.end = len(self.tokens) - 1
        self.position += 1
        self.run = Run([token], self.run.computed + len(self.run.tokens), self.run.table)


def chain(branch: BranchView, computed: int, table: Table, room: int, width: int, *, probabilities: bool) -> Chain:
    """A chain below a branch of which the draft has KV for the first `computed` tokens, in `table`."""
    sampler = branch.sampler.clone(branch.key[1])
    run = Run(branch.known[computed:], computed, table)
    return Chain(run, branch.key[1], sampler, len(branch.known), room, width, [] if probabilities else None)


def grow(executable: Executable, chains: Sequence[Chain], block_size: int) -> None:
    """Continue the chains until each has as many nodes as it may. Their tables must have slots for all but the last depth."""
    while chains:
        logits = executable.run(forced_rows([c.run for c in chains], block_size, logits=True)).logits
        chains = _draw(executable, chains, logits)


def _draw(executable: Executable, chains: Sequence[Chain], logits: NDArray[np.float32]) -> list[Chain]:
    """Give each chain its next depth, by `logits` [chains, vocab], which are spoilt; returns those that go on."""
    before = [c.sampler.clone(c.branch) if c.width > 1 else c.sampler for c in chains]
    for c, row in zip(chains, logits, strict=True):
        if c.probabilities is not None:
            c.probabilities.append(c.sampler.probabilities(row, c.position))
    drawn = draw_all(executable.pool, logits, [(c.sampler, row, c.position, -1) for row, c in enumerate(chains)])
    going = [(c, row, result[0]) for row, (c, result) in enumerate(zip(chains, drawn, strict=True)) if result is not None]
    parents = {c: c.end for c, _, _ in going}
    for c, _, token in going:
        c.add(token, c.end)
        c.advance(token)
    beside = [(c, row, token) for c, row, token in going if c.width > 1]
    for rank in range(1, max((c.width for c, _, _ in beside), default=1)):
        for _, row, token in beside:
            logits[row, token] = -np.inf  # the next draw is the next best
        beside = [(c, row, token) for c, row, token in beside if rank < c.width and len(c.tokens) < c.room]
        draws = [(before[row].clone(c.branch), row, c.position - 1, -1) for c, row, _ in beside]
        drawn = draw_all(executable.pool, logits, draws)
        beside = [(c, row, result[0]) for (c, row, _), result in zip(beside, drawn, strict=True) if result is not None]
        for c, _, token in beside:
            c.add(token, parents[c])
    return [c for c, _, _ in going if len(c.tokens) < c.room]
