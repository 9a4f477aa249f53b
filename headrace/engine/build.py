"""From the parts of a step to the ragged batch that a program sees."""

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Guess, Ints, RaggedBatch
from headrace.engine.scheduler import Part
from headrace.kv.blocks import BlockPool

WORD_BITS = 64
"""Guess rows for which a word of `ancestors` has bits."""


def build(parts: list[Part], pool: BlockPool) -> RaggedBatch:
    """One batch of all rows; notes in each part where its logits will be."""
    tokens, positions, slots, row_start = _ints(), _ints(), _ints(), _ints([0])
    context_len, forced_len = _ints(), _ints()
    logit_rows, branch_of = _ints(), _ints()
    for i, part in enumerate(parts):
        branch, guess = part.branch, part.guess
        first, end = branch.computed, branch.computed + part.forced
        start = len(tokens)
        tokens.extend(branch.known[first:end])
        positions.extend(range(first, end))
        if guess.tokens:
            tokens.extend(guess.tokens)
            positions.extend(end - 1 + depth for depth in _depths(guess))
        slots.extend(pool.slots(branch.table, first, end + len(guess.tokens)))
        row_start.append(len(tokens))
        context_len.append(first)
        forced_len.append(part.forced)
        part.first_logit = len(logit_rows)
        scored = branch.prompt_rows(part.forced)
        logit_rows.extend(range(start + scored.start - first, start + scored.stop - first))
        part.first_draw = len(logit_rows)
        if part.draws:
            logit_rows.extend(range(start + part.forced - 1, len(tokens)))
        branch_of.extend([i] * (len(logit_rows) - part.first_logit))
    return RaggedBatch(
        tokens=np.frombuffer(tokens, np.int32),
        positions=np.frombuffer(positions, np.int32),
        slots=np.frombuffer(slots, np.int32),
        row_start=np.frombuffer(row_start, np.int32),
        context_len=np.frombuffer(context_len, np.int32),
        forced_len=np.frombuffer(forced_len, np.int32),
        block_table=_block_table(parts),
        ancestors=_ancestors(parts, row_start),
        logit_rows=np.frombuffer(logit_rows, np.int32),
        branch_of=np.frombuffer(branch_of, np.int32),
    )


def _ints(values: list[int] | tuple[()] = ()) -> "array[int]":
    """A list that NumPy can view as int32 without a copy: faster than lists for the few rows of a step that decodes."""
    return array("i", values)


def _depths(guess: Guess) -> Iterator[int]:
    """Distance of each node from the last forced row."""
    depths: list[int] = []
    for parent in guess.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return iter(depths)


def _block_table(parts: list[Part]) -> Ints:  # [branches, max_blocks]
    width = max([len(part.branch.table) for part in parts])
    table = _ints()
    for part in parts:
        blocks = part.branch.table
        table.extend(blocks)
        table.extend([0] * (width - len(blocks)))
    return np.frombuffer(table, np.int32).reshape(len(parts), width)


def _ancestors(parts: list[Part], row_start: "array[int]") -> NDArray[np.uint64] | None:  # [rows, words]
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
