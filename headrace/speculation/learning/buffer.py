"""A bounded buffer of verified tokens and their taps, in memory that two processes share.

The engine writes windows, and the oldest leave. The trainer reads them. Neither waits for the
other: a window that is replaced during a read is read again or left out.
"""

import math
import mmap
import os
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PAIRS = 128
"""Maximum pairs of a window. The pair of position p has the row of p and the token at p + 1."""

Bits = NDArray[np.uint16]
"""Numbers in bf16."""

_HEAD = np.dtype([("idle_since", "<f8"), ("written", "<i8")])
_HEAD_BYTES = 64


class Window(NamedTuple):
    """Adjacent pairs of one sequence."""

    number: int
    """Number among all windows, from 1."""
    position: int
    """Position of the first pair."""
    first: int
    """The first pair to train on; pairs before it are its context."""
    tokens: NDArray[np.int32]  # [pairs] the token after each position
    taps: Bits  # [pairs, width]

    @property
    def num_trained(self) -> int:
        """Pairs to train on. The last pair has no token to predict."""
        return len(self.tokens) - 1 - self.first


class LearningBuffer:
    """Windows in `num_bytes` bytes. `descriptor` is of the memory; None makes it."""

    def __init__(self, width: int, num_bytes: int, descriptor: int | None = None) -> None:
        self._record = np.dtype(
            [
                ("number", "<i8"),
                ("position", "<i4"),
                ("first", "<i4"),
                ("count", "<i4"),
                ("tokens", "<i4", (PAIRS,)),
                ("taps", "<u2", (PAIRS, width)),
            ]
        )
        self.num_windows = max(1, (num_bytes - _HEAD_BYTES) // self._record.itemsize)
        size = _HEAD_BYTES + self.num_windows * self._record.itemsize
        self.descriptor = descriptor
        if self.descriptor is None:
            self.descriptor = os.memfd_create("headrace-learning")
            os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self._head = np.frombuffer(self._memory, _HEAD, 1)
        self._windows = np.frombuffer(self._memory, self._record, self.num_windows, _HEAD_BYTES)

    @property
    def written(self) -> int:
        """Number of windows so far, replaced ones included."""
        return int(self._head["written"][0])

    @property
    def idle_seconds(self) -> float:
        """Seconds since the engine had work; negative while it has."""
        since = float(self._head["idle_since"][0])
        return monotonic() - since if math.isfinite(since) else -1.0

    def set_idle(self, is_idle: bool) -> None:
        self._head["idle_since"][0] = monotonic() if is_idle else math.inf

    def write(self, position: int, first: int, tokens: NDArray[np.int32], taps: Bits) -> None:
        """Add a window of at most `PAIRS` pairs in place of the oldest."""
        number, count = self.written + 1, len(tokens)
        place = self._windows[(number - 1) % self.num_windows]
        place["number"] = 0
        place["position"], place["first"], place["count"] = position, first, count
        place["tokens"][:count] = tokens
        place["taps"][:count] = taps
        place["number"] = number
        self._head["written"][0] = number

    def read(self, number: int) -> Window | None:
        """Copy a window; None if it has left."""
        place = self._windows[(number - 1) % self.num_windows]
        if place["number"] != number:
            return None
        count = int(place["count"])
        window = Window(
            number=number,
            position=int(place["position"]),
            first=int(place["first"]),
            tokens=place["tokens"][:count].copy(),
            taps=place["taps"][:count].copy(),
        )
        return window if place["number"] == number else None

    def close(self) -> None:
        """Free this process's share of the memory."""
        del self._head, self._windows
        self._memory.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def window_bytes(width: int) -> int:
    """Bytes of a window of rows of this width."""
    return PAIRS * (2 * width + 4) + 20


def to_bits(rows: NDArray[np.float32]) -> Bits:
    """Round to bf16."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
