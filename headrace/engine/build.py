"""From the parts of a step to the ragged batch that a program sees."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Guess, RaggedBatch
from headrace.engine.scheduler import Part
from headrace.kv.blocks import BlockPool
from headrace.kv.rows import block_table, ints

WORD_BITS = 64
"""Guess rows for which a word of `ancestors` has bits."""


def build(parts: list[Part], pool: BlockPool) -> RaggedBatch:
    """One batch of all rows; notes in each part where its logits will be."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    row_start = [0]
    logit_rows: list[int] = []
    branch_of: list[int] = []
    for i, part in enumerate(parts):
        branch, guess = part.branch, part.guess
        first, end, start = branch.computed, branch.computed + part.forced, len(tokens)
        tokens += branch.known[first:end]
        positions += range(first, end)
        if guess.tokens:
            tokens += guess.tokens
            positions += (end - 1 + depth for depth in _depths(guess))
        slots += pool.slots(branch.table, first, end + len(guess.tokens))
        row_start.append(len(tokens))
        part.first_logit = len(logit_rows)
        logit_rows += [start + position - first for position in branch.prompt_rows(part.forced)]
        part.first_draw = len(logit_rows)
        if part.draws:
            logit_rows += range(start + part.forced - 1, len(tokens))
        branch_of += [i] * (len(logit_rows) - part.first_logit)
    return RaggedBatch(
        tokens=ints(tokens),
        positions=ints(positions),
        slots=ints(slots),
        row_start=ints(row_start),
        context_len=ints([part.branch.computed for part in parts]),
        forced_len=ints([part.forced for part in parts]),
        block_table=block_table([part.branch.table for part in parts]),
        ancestors=_ancestors(parts, row_start),
        logit_rows=ints(logit_rows),
        branch_of=ints(branch_of),
    )


def _depths(guess: Guess) -> Iterator[int]:
    """Distance of each node from the last forced row."""
    depths: list[int] = []
    for parent in guess.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return iter(depths)


def _ancestors(parts: list[Part], row_start: list[int]) -> NDArray[np.uint64] | None:  # [rows, words]
    """Bits over the guess rows of a branch; None when every guess is a chain, in which all earlier nodes are ancestors."""
    if all(parent == node - 1 for part in parts for node, parent in enumerate(part.guess.parents)):
        return None
    words = -(-max(len(part.guess.tokens) for part in parts) // WORD_BITS)
    bits = np.zeros((row_start[-1], words), np.uint64)
    for part, start in zip(parts, row_start, strict=False):
        first = start + part.forced
        for node, parent in enumerate(part.guess.parents):
            if parent >= 0:
                bits[first + node] = bits[first + parent]
            bits[first + node, node // WORD_BITS] |= np.uint64(1 << node % WORD_BITS)
    return bits
