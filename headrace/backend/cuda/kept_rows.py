"""Rows of steps that stay on the device while the host refers to them.

A drafter reads rows of the target some steps later. The host holds an object for each row, and
the row's memory is free when the host drops the object. Writes and reads are in the order of one
stream, so memory that the host frees can be given away at once.
"""

from collections.abc import Callable, Sequence

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels.gather import gather_rows, scatter_rows
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.stream import Stream
from headrace.backend.cuda.ticket import Slot
from headrace.backend.cuda.workspace import Workspace

_MIN_ROWS = 256
_PADDING = 0
"""The place that padding rows are written to and read from."""


class KeptRow:
    """A row of a store, whose memory is free after this object."""

    __slots__ = ("_free", "place")

    def __init__(self, place: int, free: list[int]) -> None:
        self.place = place
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.place)


class KeptStep:
    """The rows of one step. Rows without a handle are free after this object."""

    def __init__(self, places: list[int], free: list[int]) -> None:
        self._places, self._free = places, free
        self._rows: dict[int, KeptRow] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: int) -> KeptRow:
        if row not in self._rows:
            self._rows[row] = KeptRow(self._places[row], self._free)
        return self._rows[row]

    def __del__(self) -> None:
        self._free += [place for row, place in enumerate(self._places) if row not in self._rows]


class RowStore:
    """Device memory for rows [capacity, width], which grows as the host keeps more rows."""

    def __init__(self, width: int, stream: Stream, workspace: Workspace) -> None:
        self._stream, self._workspace = stream, workspace
        self._free: list[int] = []
        self._rows = torch.zeros(1, width, device=DEVICE)
        self._index = torch.zeros(_MIN_ROWS, dtype=torch.int32, device=DEVICE)
        # Launches over the tensors of steps, which the workspace replaces as it grows
        self._launches: dict[tuple[str, int, int], Launch] = {}
        self._bound = workspace.grown

    @property
    def num_kept(self) -> int:
        """Number of rows in use."""
        return len(self._rows) - 1 - len(self._free)

    def keep(self, rows: torch.Tensor, count: int, slot: Slot) -> KeptStep:
        """Copy the first `count` of `rows` [padded rows, width] to memory of their own."""
        while len(self._free) < count:
            self._grow()
        places = self._free[-count:]
        del self._free[-count:]
        self._send_index(places, len(rows), slot)
        self._run("keep", rows, lambda: scatter_rows(self._rows, rows, self._index[: len(rows)]))
        return KeptStep(places, self._free)

    def read(self, out: torch.Tensor, rows: Sequence[KeptRow], slot: Slot) -> None:
        """Copy kept rows to the first rows of `out` [padded rows, width]."""
        self._send_index([row.place for row in rows], len(out), slot)
        self._run("read", out, lambda: gather_rows(out, self._rows, self._index[: len(out)]))

    def _send_index(self, places: Sequence[int], size: int, slot: Slot) -> None:
        if size > len(self._index):
            self._index = torch.zeros(2 * size, dtype=torch.int32, device=DEVICE)
            self._launches.clear()
        host = slot.take("places", size)
        host.array[: len(places)] = places
        host.array[len(places) :] = _PADDING
        self._stream.copy(self._index[:size], host.tensor)

    def _run(self, name: str, rows: torch.Tensor, make: Callable[[], Launch]) -> None:
        if self._bound != self._workspace.grown:
            self._launches.clear()
            self._bound = self._workspace.grown
        key = name, rows.data_ptr(), len(rows)
        if key not in self._launches:
            self._launches[key] = make()
        self._stream.run([self._launches[key]])

    def _grow(self) -> None:
        old = self._rows
        size = max(_MIN_ROWS, 2 * len(old))
        self._rows = torch.zeros(size, old.shape[1], device=DEVICE)
        self._stream.copy(self._rows[: len(old)], old)
        self._free += range(size - 1, len(old) - 1, -1)
        self._launches.clear()
