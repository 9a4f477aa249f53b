"""Drafts from a model: it continues several sequences at once, one token each in a run, with the noise of their own draws."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace._native import Sampler, draw_all
from headrace.backend import Executable
from headrace.batch import DraftTree, SequenceView
from headrace.kv.manager import Tables
from headrace.kv.rows import TokenRun, batch_of_runs


@dataclass(slots=True, eq=False)
class Chain:
    """What a drafting model makes of one sequence: a chain of its draws, each beside the next best tokens in its place."""

    run: TokenRun
    """What is to be computed next."""
    seq: int
    """The index that gives its noise."""
    sampler: Sampler
    """Draws as the sequence will, from what the draft thinks of it."""
    position: int
    """Of the next token."""
    budget: int
    """DraftTree nodes that it may have."""
    probabilities: list[NDArray[np.float64]] | None
    """Of each node, if they are wanted."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    end: int = -1
    """The node from which the chain goes on."""

    @property
    def draft(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents, probabilities=np.array(self.probabilities) if self.probabilities else None)

    @property
    def path(self) -> list[int]:
        """The tokens of the chain itself."""
        path: list[int] = []
        node = self.end
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def advance(self, node: int) -> None:
        """Go on below this node."""
        self.end = node
        self.position += 1
        self.run = TokenRun([self.tokens[node]], self.run.computed + len(self.run.tokens), self.run.tables)


def chain(seq: SequenceView, computed: int, tables: Tables, budget: int, *, probabilities: bool) -> Chain:
    """A chain below a sequence of which the draft has KV for the first `computed` tokens, in `tables`."""
    run = TokenRun(seq.known[computed:], computed, tables)
    index = seq.seq_id[1]
    return Chain(run, index, seq.sampler.clone(index), len(seq.known), budget, [] if probabilities else None)


def grow(executable: Executable, chains: Sequence[Chain], width: int, block_size: int) -> None:
    """Continue the chains, `width` nodes at each depth, until each has as many as it may.

    Their tables must have slots for all depths but the last.
    """
    while chains:
        logits = executable.run(batch_of_runs([c.run for c in chains], block_size, logits=True)).logits
        chains = _deepen(executable, chains, width, logits)


def _deepen(executable: Executable, chains: Sequence[Chain], width: int, logits: NDArray[np.float32]) -> list[Chain]:
    """Give each chain its next depth, by `logits` [chains, vocab], which are spoilt; returns those that go on."""
    for c, row in zip(chains, logits, strict=True):
        if c.probabilities is not None:
            c.probabilities.append(c.sampler.probabilities(row, c.position))
    before = [c.sampler.clone(c.seq) for c in chains] if width > 1 else []
    firsts: list[tuple[Chain, int]] = []
    for rank in range(width):
        turn = [row for row, c in enumerate(chains) if len(c.tokens) < c.budget]
        samplers = [before[row].clone(chains[row].seq) if rank else chains[row].sampler for row in turn]
        draws = [(sampler, row, chains[row].position, -1) for sampler, row in zip(samplers, turn, strict=True)]
        for row, drawn in zip(turn, draw_all(executable.pool, logits, draws), strict=True):
            if drawn is None:  # not finite: it ends here
                continue
            c, token = chains[row], drawn[0]
            if not rank:
                firsts.append((c, len(c.tokens)))
            c.tokens.append(token)
            c.parents.append(c.end)
            logits[row, token] = -np.inf  # the next draw in its place is the next best
    for c, node in firsts:
        c.advance(node)
    return [c for c, _ in firsts if len(c.tokens) < c.budget]
