"""Random ragged batches: prompt chunks, single rows and draft trees at random depths."""

import numpy as np

from headrace.batch import KvRows, RaggedBatch


class Sequence:
    """A sequence: a shuffled block table, and its number of tokens with KV."""

    def __init__(self, blocks: list[int], block_size: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.computed = 0

    def slots(self, first: int, count: int) -> list[int]:
        return [
            self.blocks[i // self.block_size] * self.block_size + i % self.block_size
            for i in range(first, first + count)
        ]


def batch_of(
    sequences: list[Sequence],
    num_scheduled: list[list[int]],
    drafts: list[tuple[list[int], list[int]]],
    trees: bool,
    num_groups: int = 1,
) -> RaggedBatch:
    """A batch with scheduled tokens and a (tokens, parents) tree for each sequence, and logits for
    all rows. All KV groups have the same blocks.
    """
    tokens, positions, slots, starts, rows_seen = [], [], [], [0], []
    for sequence, decided, (drafted, parents) in zip(sequences, num_scheduled, drafts, strict=True):
        depths, seen = [], []
        for i, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            seen.append((0 if parent < 0 else seen[parent]) | 1 << i)
        start = sequence.computed
        tokens += decided + drafted
        positions += [
            *range(start, start + len(decided)),
            *(start + len(decided) + d for d in depths),
        ]
        slots += sequence.slots(start, len(decided) + len(drafted))
        starts.append(len(tokens))
        rows_seen += [0] * len(decided) + seen
    words = 1 + max((len(g) for g, _ in drafts), default=0) // 64
    mask = 2**64 - 1
    ancestors = (
        np.array([[seen >> 64 * w & mask for w in range(words)] for seen in rows_seen], np.uint64)
        if trees
        else None
    )
    table = np.zeros((len(sequences), max(len(s.blocks) for s in sequences)), np.int32)
    for b, sequence in enumerate(sequences):
        table[b, : len(sequence.blocks)] = sequence.blocks
    i32 = [
        np.asarray(x, np.int32)
        for x in (
            tokens,
            positions,
            starts,
            [s.computed for s in sequences],
            [len(f) for f in num_scheduled],
        )
    ]
    kv = (KvRows(np.array(slots, np.int32), table),) * num_groups
    rows = np.arange(len(tokens), dtype=np.int32)
    seq_of = np.repeat(np.arange(len(sequences)), np.diff(starts)).astype(np.int32)
    return RaggedBatch(*i32, kv, ancestors, rows, seq_of)
