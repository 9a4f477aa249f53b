"""Plain sampling steps: one token for each of the same sequences, at the next position.

The host fills their table once and then changes only the positions: filling it in Python
takes longer than a GPU step.
"""

from collections.abc import Callable, Sequence
from operator import is_not
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backend.cuda.kernels import sample_table as table
from headrace.backend.cuda.sampling_layout import COLUMNS, SampleLayout
from headrace.batch import NO_DRAFT, Ints
from headrace.logit_ops import (
    LogitOp,
    LogitOpResult,
    SampleOp,
    SampleResult,
    SamplerState,
    ShiftedSampleOps,
)


class PlainOps(NamedTuple):
    """Fields of the ops of a launch that samples one token per row."""

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    samplers: tuple[SamplerState, ...]

    @classmethod
    def of(cls, ops: Sequence[LogitOp]) -> "PlainOps | None":
        """The fields, if all ops are exact samples without drafts, masks and log-probabilities."""
        if set(map(type, ops)) != {SampleOp}:
            return None
        rows, positions, samplers, drafts, num_logprobs, methods, masks = zip(*ops, strict=True)

        # Sets decide this for thousands of ops faster than a loop does.
        is_plain = (
            set(map(id, drafts)) == {id(NO_DRAFT)}
            and set(num_logprobs) == {-1}
            and set(methods) == {"exact"}
            and set(map(type, masks)) == {type(None)}
        )
        return cls(rows, positions, samplers) if is_plain else None


class PlainStep:
    """Samples of one launch: a filled area with new positions."""

    def __init__(self, layout: SampleLayout, area: Ints, positions: Ints) -> None:
        self.layout, self.indices = layout, range(len(positions))
        self._area, self._positions = area, positions

    def fill(self, host: Ints) -> None:
        host[:] = self._area
        host[table.POSITION.value : COLUMNS * len(self._positions) : COLUMNS] = self._positions

    def fill_masks(self, host: NDArray[np.uint32]) -> None: ...

    def read(self, host: Ints) -> list[LogitOpResult]:
        # Samplers of plain ops ignore earlier tokens, so no token is appended to them.
        tokens, _, counts = self.layout.results(host)[0][:, : len(self._positions)].tolist()
        return [
            SampleResult([token], [], []) if count else None
            for token, count in zip(tokens, counts, strict=True)
        ]

    def cancel(self) -> None: ...


class PlainSamples:
    """The last samples that can be repeated."""

    def __init__(self) -> None:
        self._kept_ops: Sequence[LogitOp] | None = None
        self._ops: PlainOps | None = None
        self._positions = self._area = np.zeros(0, np.int32)
        self._layout: SampleLayout | None = None

    def repeat(self, ops: Sequence[LogitOp], slots: int) -> PlainStep | None:
        """The step of these ops, if they are the last ones at other positions."""
        if self._layout is None or self._layout.slots != slots:
            return None
        if isinstance(ops, ShiftedSampleOps) and ops.ops is self._kept_ops:
            return PlainStep(self._layout, self._area, self._positions + np.int32(ops.shift))

        plain, last = PlainOps.of(ops), self._ops
        if plain is None or last is None or plain.rows != last.rows:
            return None
        if any(map(is_not, plain.samplers, last.samplers)):
            return None
        self._kept_ops, self._positions = ops, np.array(plain.positions, np.int32)
        return PlainStep(self._layout, self._area, self._positions)

    def keep(
        self, ops: Sequence[LogitOp], layout: SampleLayout, fill: Callable[[Ints], None]
    ) -> None:
        plain = PlainOps.of(ops)
        if plain is None:
            return
        self._kept_ops, self._ops, self._layout = ops, plain, layout
        self._positions = np.array(plain.positions, np.int32)
        self._area = np.zeros(layout.num_ints, np.int32)
        fill(self._area)
