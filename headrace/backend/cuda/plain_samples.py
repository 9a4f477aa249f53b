"""Draws that are repeated from launch to launch, which most are: one token for each of the same
sequences, at the next position.

What the host has to say of them is written once, and then but for the positions copied: a step of
many sequences takes less time on a GPU than Python takes to look at each of them.
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
    """The ops of a launch that draws one token of each row, field by field."""

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    samplers: tuple[SamplerState, ...]

    @classmethod
    def of(cls, ops: Sequence[LogitOp]) -> "PlainOps | None":
        """The ops of a launch, if all of them are exact draws without drafts, masks and
        log-probabilities.
        """
        if set(map(type, ops)) != {SampleOp}:
            return None
        rows, positions, samplers, drafts, num_logprobs, methods, masks = zip(*ops, strict=True)
        plain = (
            set(map(id, drafts)) == {id(NO_DRAFT)}
            and set(num_logprobs) == {-1}
            and set(methods) == {"exact"}
        )
        return (
            cls(rows, positions, samplers)
            if plain and set(map(type, masks)) == {type(None)}
            else None
        )


class PlainStep:
    """The draws of one launch: those of an area that was filled before, at these positions."""

    def __init__(self, layout: SampleLayout, area: Ints, positions: Ints) -> None:
        self.layout, self.indices = layout, range(len(positions))
        self._area, self._positions = area, positions

    def fill(self, host: Ints) -> None:
        """Write what the kernels need to an area of `layout.num_ints` integers, which begins with a
        table of the draws.
        """
        host[:] = self._area
        host[table.POSITION.value : COLUMNS * len(self._positions) : COLUMNS] = self._positions

    def fill_masks(self, host: NDArray[np.uint32]) -> None:
        """There are none."""

    def read(self, host: Ints) -> list[LogitOpResult]:
        """The result of each draw. The samplers look at nothing that was drawn, so nothing is
        appended to them.
        """
        tokens, _, counts = self.layout.results(host)[0][:, : len(self._positions)].tolist()
        return [
            SampleResult([token], [], []) if count else None
            for token, count in zip(tokens, counts, strict=True)
        ]

    def cancel(self) -> None:
        """Nothing was begun that is to be undone."""


class PlainSamples:
    """The last draws that may be repeated."""

    def __init__(self) -> None:
        self._given: Sequence[LogitOp] | None = None
        """As a launch had them."""
        self._ops: PlainOps | None = None
        self._positions = self._area = np.zeros(0, np.int32)
        self._layout: SampleLayout | None = None

    def again(self, ops: Sequence[LogitOp], slots: int) -> PlainStep | None:
        """The step of these ops if they are the last ones at other positions."""
        if self._layout is None or self._layout.slots != slots:
            return None
        if isinstance(ops, ShiftedSampleOps) and ops.ops is self._given:
            return PlainStep(self._layout, self._area, self._positions + np.int32(ops.shift))
        plain, last = PlainOps.of(ops), self._ops
        if (
            plain is None
            or last is None
            or plain.rows != last.rows
            or any(map(is_not, plain.samplers, last.samplers))
        ):
            return None
        self._given, self._positions = ops, np.array(plain.positions, np.int32)
        return PlainStep(self._layout, self._area, self._positions)

    def keep(
        self, ops: Sequence[LogitOp], layout: SampleLayout, fill: Callable[[Ints], None]
    ) -> None:
        """Let ops be repeated, if they are plain, whose step fills an area."""
        if plain := PlainOps.of(ops):
            self._given, self._ops, self._positions, self._layout = (
                ops,
                plain,
                np.array(plain.positions, np.int32),
                layout,
            )
            self._area = np.zeros(layout.num_ints, np.int32)
            fill(self._area)
