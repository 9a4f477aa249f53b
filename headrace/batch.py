"""The vocabulary of one step: records only, no behaviour. A step has T rows of B sequences, of which R need logits."""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class DraftTree(NamedTuple):
    """One sequence's draft tree: `parents[i] < i`, and -1 is the sequence's last scheduled row."""

    tokens: list[int]
    parents: list[int]
    confidence: int = 0  # a class of the method's own: acceptance is measured apart for each, and a higher one should be better
    whole: bool = False  # all nodes are needed or none: the method learns from rows that are rarely accepted
    probabilities: NDArray[np.float64] | None = None  # [nodes, vocab] that each was drawn from, where acceptance needs them


NO_DRAFT = DraftTree([], [])


class KvRows(NamedTuple):
    """Where the rows of a step keep their KV in one group of layers."""

    slots: Ints  # [T] slot that the row writes
    block_table: Ints  # [B, max_blocks]; slot of index i = table[i // block] * block + i % block


class RaggedBatch(NamedTuple):
    """All that a program ever sees of a step. A sequence's rows are adjacent: scheduled ones, then drafts, parents before children."""

    tokens: Ints  # [T]
    positions: Ints  # [T] position in the sequence: computed + depth
    row_start: Ints  # [B + 1] first row of each sequence
    context_len: Ints  # [B] tokens with KV before this step
    scheduled_len: Ints  # [B] scheduled rows, at least 1
    kv: tuple[KvRows, ...]  # of each group of layers; empty for a program that keeps nothing
    ancestors: NDArray[np.uint64] | None  # [T, words] bits over the sequence's draft rows, self included; None: all chains
    logit_rows: Ints  # [R] rows whose logits are wanted, ascending
    seq_of: Ints  # [R] sequence of each of them
    inputs: NDArray[np.float32] | None = None  # [T, width] rows from the caller, for a program that begins with them, not with tokens


class StepRows(NamedTuple):
    """What a program gives back."""

    logits: NDArray[np.float32]  # [R, vocab]; valid until the next run
    hidden: NDArray[np.float32] | None  # [R, dim] final hidden rows, when the executable was asked to keep them


class StepTimes(NamedTuple):
    """Where the time of a step went, in seconds."""

    wall: float  # from the call to its return
    ops: dict[str, float]  # of each op by name, all its calls together; a backend may have ops that the program does not name
    barriers: int  # how often all threads waited for each other; an op's time ends with its barrier


class TokenLogprobs(NamedTuple):
    """Raw-distribution log-probabilities at one position: the token's own, its rank (1 = likeliest), and the top ones."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Commit(NamedTuple):
    """What one sequence keeps of a step. A sequence named by k commits is forked k - 1 times; one named by none is freed."""

    source: int  # index of the sequence in the step
    path: list[int]  # accepted draft nodes, from the root down
    tokens: list[int]  # newly decided tokens: those of the path, then the one drawn at its end; empty inside a prompt
    logprobs: list[TokenLogprobs]  # one for each new token when asked for, else empty
    row: int = -1  # for proposers: of the last scheduled row's logits in StepRows; those of node i are at row + 1 + i
    draft: DraftTree = NO_DRAFT  # for proposers: the tree that was in the step; it may have fewer nodes than were proposed

    @property
    def last_row(self) -> int:
        """The logit row that the last of the new tokens was drawn from."""
        return self.row + 1 + self.path[-1] if self.path else self.row


class SequenceView(Protocol):
    """What a proposer may see of a sequence."""

    @property
    def seq_id(self) -> tuple[int, int]: ...  # (request number, sequence index): stable over the sequence's life
    @property
    def known(self) -> list[int]: ...  # all decided tokens, prompt and output; not to be changed
    @property
    def prompt_len(self) -> int: ...
    @property
    def computed(self) -> int: ...  # known tokens with KV
    @property
    def tables(self) -> Any: ...  # of each group of layers, the blocks of their slots and of those of the draft budget
    @property
    def scope(self) -> Hashable: ...  # what one scope holds is not to be drafted from by others
    @property
    def sampler(self) -> Any: ...  # a native Sampler; a clone of it draws with the sequence's own noise, and leaves no trace


class Proposer(Protocol):
    """A proposer. Drafts may be wrong in any way; they never change a token.

    One with `bounded` is quick and called in the engine's thread; others have their own. One with `needs_rows` learns from its
    rows, and has some now and then that should not pay. One with a `width`, nodes at each depth, takes time for each of these.
    """

    max_nodes: int

    def propose(self, seqs: list[SequenceView], budget: list[int]) -> list[DraftTree]:
        """A tree of at most `budget[i]` nodes below the end of each sequence."""

    def observe(self, seqs: list[SequenceView], commits: list[Commit], rows: StepRows) -> None:
        """See what became of a step that it was asked for, or the last before; `seqs[commit.source]` has the new tokens."""
