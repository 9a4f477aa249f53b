"""Records of one step: the ragged batch, its draft trees, and the tokens that sequences keep.

Every step is one ragged batch of rows: prompt chunks, plain decoding, draft trees and
recomputation look alike. Each sequence has rows for its scheduled known tokens, which
have no KV yet, and a tree of draft rows after the last of them. The rows of a sequence
are adjacent: known tokens first, then drafts, parents before children. Shapes: T rows,
B sequences, R rows with logits, P pooled rows.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def ints(values: list[int]) -> Ints:
    """Return an int32 array of the values."""
    return np.array(values, np.int32)


class DraftTree(NamedTuple):
    """Draft tokens of one sequence, as a tree."""

    tokens: list[int]
    parents: list[int]
    """Parent of each node: an earlier node, or -1 for the last scheduled known token."""
    confidence: int | list[int] = 0
    """Class from 0, set by the proposer: of the tree, or of each node. Acceptance is measured per
    class, and should rise with it. Class 0 of a node is for an unknown confidence.
    """
    indivisible: bool = False
    """Whether the tree runs with all its nodes or not at all, because the proposer
    learns from its rows.
    """
    probabilities: NDArray[np.float64] | None = None
    """[nodes, vocab] distributions of the tokens, for rejection sampling."""


NO_DRAFT = DraftTree([], [])


class KvRows(NamedTuple):
    """KV slots of the rows of a step, in one KV group."""

    slots: Ints  # [T] slot that the row writes
    block_table: Ints  # [B, max_blocks]; slot of index i = table[i // block] * block + i % block


class RaggedBatch(NamedTuple):
    """Rows of one step, as a program runs them."""

    tokens: Ints  # [T]
    positions: Ints  # [T] position in the sequence: context + depth
    row_start: Ints  # [B + 1] first row of each sequence
    context_len: Ints  # [B] tokens with KV before this step
    scheduled_len: Ints  # [B] rows of known tokens; 0 in a launch of drafts alone
    kv: tuple[KvRows, ...]  # one per KV group; empty for a program without KV
    ancestors: NDArray[np.uint64] | None
    """[T, words] bit set of the draft rows that each row attends to, its own included.
    None: all drafts are chains.
    """
    logit_rows: Ints  # [R] rows with logits, ascending
    seq_of: Ints  # [R] sequence of each of them
    token_source: Ints | None = None
    """[T] logit op of the previous launch that samples the row's token; -1: see `tokens`."""
    inputs: NDArray[np.float32] | None = None
    """[T, width] input rows of a program that does not start with tokens."""
    adapters: Ints | None = None
    """[B] adapter number of each sequence; -1, or None for all sequences: no adapter."""
    pooled_rows: Ints | None = None
    """[P] rows that embeddings pool, ascending."""

    @property
    def gathered_rows(self) -> Ints:  # [R + P]
        """Rows that the last layer computes: rows with logits, then pooled rows."""
        if self.pooled_rows is None:
            return self.logit_rows
        return np.concatenate([self.logit_rows, self.pooled_rows])


class BatchPart(NamedTuple):
    """Some sequences of a batch, and the places of their gathered rows in the whole."""

    batch: RaggedBatch
    rows: Ints  # indices among the whole's rows
    logit_rows: Ints  # indices among the whole's logit rows
    pooled_rows: Ints  # indices among the whole's pooled rows


def part_of(batch: RaggedBatch, sequences: list[int]) -> BatchPart:
    """The part of a batch with these sequences, ascending."""
    chosen = np.array(sequences)
    lengths = np.diff(batch.row_start)
    seq_of_row = np.repeat(np.arange(len(lengths)), lengths)
    rows = np.flatnonzero(np.isin(seq_of_row, chosen))
    new_row = np.full(len(batch.tokens), -1, np.int32)
    new_row[rows] = np.arange(len(rows))

    def kept(gathered: Ints) -> Ints:
        return np.flatnonzero(new_row[gathered] >= 0).astype(np.int32)

    def of_rows(array: Any) -> Any:
        return None if array is None else np.ascontiguousarray(array[rows])

    logit_rows = kept(batch.logit_rows)
    pooled = batch.pooled_rows
    pooled_rows = ints([]) if pooled is None else kept(pooled)
    part = RaggedBatch(
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        row_start=np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int32),
        context_len=batch.context_len[chosen],
        scheduled_len=batch.scheduled_len[chosen],
        kv=tuple(
            KvRows(group.slots[rows], np.ascontiguousarray(group.block_table[chosen]))
            for group in batch.kv
        ),
        ancestors=of_rows(batch.ancestors),
        logit_rows=new_row[batch.logit_rows[logit_rows]],
        seq_of=np.searchsorted(chosen, batch.seq_of[logit_rows]).astype(np.int32),
        token_source=of_rows(batch.token_source),
        inputs=of_rows(batch.inputs),
        adapters=None if batch.adapters is None else batch.adapters[chosen],
        pooled_rows=None if pooled is None else new_row[pooled[pooled_rows]],
    )
    return BatchPart(part, rows.astype(np.int32), logit_rows, pooled_rows)


class StepTimes(NamedTuple):
    """Seconds of a step and of its ops."""

    wall: float  # from the call to its return
    ops: dict[str, float]  # total of each op, by name; a backend may add its own ops
    barriers: int
    """Number of barriers, at which all threads wait for each other. An op ends with its barrier."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, before temperature and penalties."""

    logprob: float
    rank: int  # of the token; 1 is the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


class Commit(NamedTuple):
    """Tokens that one sequence keeps from a step.

    A sequence with k commits is forked k - 1 times; a sequence without commits is
    freed.
    """

    source: int  # index of the sequence in the step
    path: list[int]  # accepted draft nodes, from the root down
    tokens: list[int]
    """New tokens: the accepted tokens, then the token sampled after them; empty inside a prompt."""
    logprobs: list[TokenLogprobs]  # one per new token, if the request needs them
    row: int = -1
    """Index among the logit rows of the last scheduled known token; node i has index
    row + 1 + i. Only proposers use it.
    """
    draft: DraftTree = NO_DRAFT
    """Tree of the step, which may have fewer nodes than its proposal. Only proposers use it."""
    rows: range = range(0)
    """Indices among all rows of the scheduled known tokens; draft nodes follow them. Only proposers
    use it.
    """
    position: int = -1
    """Position in the sequence of the first of them."""

    @property
    def last_row(self) -> int:
        """Index among the logit rows of the row that the last new token was sampled from."""
        return self.row + 1 + self.path[-1] if self.path else self.row
