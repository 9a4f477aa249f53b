"""Cuts the verified tokens of running sequences into windows of the buffer."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary, finalize

import numpy as np
from numpy.typing import NDArray

from headrace.proposer import SequenceView
from headrace.speculation.learning.buffer import PAIRS, LearningBuffer, to_bits

Rows = NDArray[np.float32]

CONTEXT = 32
"""Pairs before those to train on, which have trained already or belong to the prompt."""
_MIN_TRAINED = 8
_MAX_SEQUENCES = 8
"""Sequences that are followed at a time: each needs the memory of a window."""


class Collector:
    """Follows some of the running sequences. One thread uses it."""

    def __init__(self, buffer: LearningBuffer, width: int) -> None:
        self.num_tokens = 0
        """Tokens in all windows so far, without contexts."""
        self._buffer = buffer
        self._width = width
        self._is_closed = False
        self._runs: WeakKeyDictionary[SequenceView, _Run] = WeakKeyDictionary()

    def add(self, seq: SequenceView, position: int, taps: Rows, rows: Sequence[int]) -> None:
        """Add the pairs of positions from `position` on, with rows of `taps`.

        The tokens after all these positions are known.
        """
        run = self._runs.get(seq)
        if run is None:
            if len(self._runs) >= _MAX_SEQUENCES:
                return
            run = self._runs[seq] = _Run(self._width)
            finalize(seq, self._end, run).atexit = False
        # Of a prompt only the end counts, as context.
        skipped = max(0, seq.prompt_len - 1 - CONTEXT - position, run.end - position)
        for i in range(skipped, len(rows), PAIRS):
            self._add(run, seq, position + i, taps, rows[i : i + PAIRS])

    def _add(
        self, run: "_Run", seq: SequenceView, position: int, taps: Rows, rows: Sequence[int]
    ) -> None:
        if run.end != position and run.count:  # a gap
            self._end(run)
            run.count = 0
        while rows:
            if not run.count:
                run.position = position
                run.first = max(0, seq.prompt_len - 1 - position)
            count = min(len(rows), PAIRS - run.count)
            part = slice(run.count, run.count + count)
            run.tokens[part] = seq.known[position + 1 : position + 1 + count]
            run.taps[part] = to_bits(taps[np.asarray(rows[:count])])
            run.count += count
            position, rows = position + count, rows[count:]
            if run.count == PAIRS:
                self._end(run)
                run.keep_context()

    def close(self) -> None:
        self._is_closed = True

    def _end(self, run: "_Run") -> None:
        num_trained = run.count - 1 - run.first
        if num_trained >= _MIN_TRAINED and not self._is_closed:
            self.num_tokens += num_trained
            part = slice(0, run.count)
            self._buffer.write(run.position, run.first, run.tokens[part], run.taps[part])


class _Run:
    """Adjacent pairs of a sequence that are not in the buffer yet."""

    def __init__(self, width: int) -> None:
        self.position = 0
        self.first = 0
        self.count = 0
        self.tokens = np.zeros(PAIRS, np.int32)
        self.taps = np.zeros((PAIRS, width), np.uint16)

    @property
    def end(self) -> int:
        """The position after the last pair."""
        return self.position + self.count

    def keep_context(self) -> None:
        """Begin a window with the last pairs of this one."""
        self.tokens[:CONTEXT] = self.tokens[-CONTEXT:]
        self.taps[:CONTEXT] = self.taps[-CONTEXT:]
        self.position += PAIRS - CONTEXT
        # The last pair had no token to predict.
        self.first = max(self.first - (PAIRS - CONTEXT), CONTEXT - 1)
        self.count = CONTEXT
