"""The records of one step: the ragged batch that a program runs, the draft trees in it, and what
each sequence keeps of it.

Every step is one ragged batch of rows, of prompt chunks, plain decoding, draft trees or
recomputation alike. Each sequence has the rows of its scheduled known tokens, which have no KV yet,
and below the last of them a tree of draft rows. The rows of a sequence are adjacent: known tokens
first, then drafts, parents before children. Shapes: T rows, B sequences, R rows whose logits are
computed, P rows that are pooled.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def ints(values: list[int]) -> Ints:
    """An array of these numbers, as batches have them."""
    return np.array(values, np.int32)


class DraftTree(NamedTuple):
    """Draft tokens for one sequence. `parents[i] < i` is the node that node i follows; -1 is the
    last scheduled known token.
    """

    tokens: list[int]
    parents: list[int]
    # a class, from 0 on, that the proposer gives the tree: acceptance is measured for each, and
    # should rise with it
    confidence: int = 0
    # whether it runs with all its nodes or not at all, as the proposer learns from its rows
    indivisible: bool = False
    probabilities: NDArray[np.float64] | None = (
        None  # [nodes, vocab] that the tokens were drawn from, for rejection sampling
    )


NO_DRAFT = DraftTree([], [])


class KvRows(NamedTuple):
    """Where the rows of a step keep their KV in one group of layers."""

    slots: Ints  # [T] slot that the row writes
    block_table: Ints  # [B, max_blocks]; slot of index i = table[i // block] * block + i % block


class RaggedBatch(NamedTuple):
    """The rows of one step, as a program runs them."""

    tokens: Ints  # [T]
    positions: Ints  # [T] position in the sequence: context + depth
    row_start: Ints  # [B + 1] first row of each sequence
    context_len: Ints  # [B] tokens with KV before this step
    scheduled_len: Ints  # [B] rows of known tokens, at least 1
    kv: tuple[KvRows, ...]  # of each group of layers; empty for a program that keeps nothing
    ancestors: (
        NDArray[np.uint64] | None
    )  # [T, words] bits of the draft rows it sees, its own included; None: all are chains
    logit_rows: Ints  # [R] rows whose logits are computed, ascending
    seq_of: Ints  # [R] sequence of each of them
    token_source: Ints | None = (
        None  # [T] logit op of the launch before that draws the row's token; -1: it is in `tokens`
    )
    inputs: NDArray[np.float32] | None = (
        None  # [T, width] the first rows of a program that does not begin with tokens
    )
    adapters: Ints | None = (
        None  # [B] number of the adapter of each sequence; -1, or None for all: it has none
    )
    pooled_rows: Ints | None = (
        None  # [P] rows that prompts to be embedded pool, ascending; None: there are none
    )

    @property
    def gathered_rows(self) -> Ints:  # [R + P]
        """The rows that the last layer goes on with: those that have logits, and behind them those
        that are pooled.
        """
        return (
            self.logit_rows
            if self.pooled_rows is None
            else np.concatenate([self.logit_rows, self.pooled_rows])
        )


class StepTimes(NamedTuple):
    """The time of a step and of its parts, in seconds."""

    wall: float  # from the call to its return
    ops: dict[str, float]  # total of each op, by name; a backend may add ops of its own
    # number of barriers, at which all threads wait for each other; the time of an op ends with its
    # barrier
    barriers: int


class TokenLogprobs(NamedTuple):
    """Raw-distribution log-probabilities at one position: the token's own, its rank (1: the
    likeliest), and those of the top tokens.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Commit(NamedTuple):
    """What one sequence keeps of a step. A sequence named by k commits is forked k - 1 times; one
    named by none is freed.
    """

    source: int  # index of the sequence in the step
    path: list[int]  # accepted draft nodes, from the root down
    tokens: list[
        int
    ]  # new tokens: those of the path, then the one drawn at its end; empty inside a prompt
    logprobs: list[TokenLogprobs]  # one for each new token where they are asked for, else empty
    # for proposers: index among the logit rows of the last scheduled known token; node i is at row
    # + 1 + i
    row: int = -1
    # for proposers: the tree that was in the step; it may have fewer nodes than were proposed
    draft: DraftTree = NO_DRAFT

    @property
    def last_row(self) -> int:
        """Index among the logit rows of the row that the last of the new tokens was drawn from."""
        return self.row + 1 + self.path[-1] if self.path else self.row
