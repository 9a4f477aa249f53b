"""Records the rows of the steps that answer requests, to train other models on them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView
from headrace.quant.spec import encode_numbers
from headrace.record import frozen

Bits = NDArray[np.uint16]
"""bf16 numbers."""


@frozen(eq=False)
class RecordedRows:
    tokens: list[int]
    """Tokens of the sequence with a row."""
    next_token: int
    """The token that was drawn after them."""
    taps: Bits  # [tokens, taps * dim]
    final: Bits  # [tokens, dim]


@dataclass(slots=True, eq=False)
class _Recording:
    known: list[int] = field(default_factory=list)
    parts: list[Bits] = field(default_factory=list)
    num_rows: int = 0


class RowRecorder:
    """A proposer that never drafts, and keeps the rows of some requests in bf16.

    A row is the residual stream before each of the layers `taps`, and the row before the head.
    Requests are known by their number. A preempted sequence computes its rows again, with the same
    bits, so only new positions are kept. A cached prefix has no rows: switch the prefix cache off.
    """

    def __init__(self, taps: Sequence[int], dim: int) -> None:
        self.traits = ProposerTraits(0, in_engine_thread=True, time_limit=None, needs_taps=True)
        self.taps = tuple(taps)
        self._dim = dim
        self._recordings: dict[int, _Recording] = {}

    def start(self, request: int) -> None:
        """Record a request from its first step on."""
        self._recordings[request] = _Recording()

    def drop(self, request: int) -> None:
        """Forget a request and its rows."""
        self._recordings.pop(request, None)

    def take(self, request: int) -> RecordedRows | None:
        """Return the rows of an ended request and forget them; None if it lacks a row."""
        recording = self._recordings.pop(request)
        count, known = recording.num_rows, recording.known
        if not count or len(known) != count + 1:
            return None
        rows = np.concatenate(recording.parts)
        split = len(self.taps) * self._dim
        return RecordedRows(known[:count], known[count], rows[:, :split], rows[:, split:])

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        return [NO_DRAFT] * len(seqs)

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        if result.taps is None:
            return
        for commit in commits:
            seq = seqs[commit.source]
            recording = self._recordings.get(seq.seq_id[0])
            if recording is None:
                continue
            recording.known = seq.known
            first = recording.num_rows - commit.position
            if 0 <= first < len(commit.rows):
                rows = result.taps[commit.rows.start + first : commit.rows.stop]
                recording.parts.append(_bf16(rows))
                recording.num_rows += len(rows)


def _bf16(rows: NDArray[np.float32]) -> Bits:
    bits = encode_numbers(np.ascontiguousarray(rows), "bf16")
    return bits.astype(np.uint16, copy=False)
