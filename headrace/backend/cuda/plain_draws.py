"""Draws that are repeated from launch to launch, which most are: one token for each of the same sequences, at the next position.

What the host has to say of them is written once, and then but for the positions copied: a step of many sequences takes less time on a GPU
than Python takes to look at each of them.
"""

from collections.abc import Sequence
from operator import is_not
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backend.cuda.drawing_layout import DrawLayout
from headrace.backend.cuda.kernels import draw_table as table
from headrace.batch import NO_DRAFT, Ints
from headrace.logit_ops import Draw, Drawn, LogitOp, LogitOpResult, SamplerState


class PlainOps(NamedTuple):
    """The ops of a launch that draws one token of each row, field by field."""

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    samplers: tuple[SamplerState, ...]

    @classmethod
    def of(cls, ops: Sequence[LogitOp]) -> "PlainOps | None":
        """The ops of a launch, if all of them are exact draws without drafts, masks and log-probabilities."""
        if set(map(type, ops)) != {Draw}:
            return None
        rows, positions, samplers, drafts, num_logprobs, methods, masks = zip(*ops, strict=True)
        plain = set(map(id, drafts)) == {id(NO_DRAFT)} and set(num_logprobs) == {-1} and set(methods) == {"exact"}
        return cls(rows, positions, samplers) if plain and set(map(type, masks)) == {type(None)} else None


class PlainStep:
    """The draws of one launch: those of an area that was filled before, at these positions."""

    def __init__(self, layout: DrawLayout, area: Ints, positions: tuple[int, ...]) -> None:
        self.layout, self.indices = layout, range(len(positions))
        self._area, self._positions = area, positions

    def fill(self, host: Ints) -> None:
        """Write what the kernels need to an area of `layout.num_ints` integers."""
        host[:] = self._area
        self.layout.inputs(host)[0][: len(self._positions), table.POSITION.value] = self._positions

    def fill_masks(self, host: NDArray[np.uint32]) -> None:
        """There are none."""

    def read(self, host: Ints) -> list[LogitOpResult]:
        """The result of each draw. The samplers look at nothing that was drawn, so nothing is appended to them."""
        tokens, _, counts = self.layout.results(host)[0][:, : len(self._positions)].tolist()
        return [Drawn([token], [], []) if count else None for token, count in zip(tokens, counts, strict=True)]

    def cancel(self) -> None:
        """Nothing was begun that is to be undone."""


class PlainDraws:
    """The last draws that may be repeated."""

    def __init__(self) -> None:
        self._ops: PlainOps | None = None
        self._layout: DrawLayout | None = None
        self._area = np.zeros(0, np.int32)

    def again(self, ops: PlainOps | None, slots: int) -> PlainStep | None:
        """The step of these ops if they are the last ones at other positions."""
        last = self._ops
        if ops is None or last is None or self._layout is None or self._layout.slots != slots:
            return None
        if ops.rows != last.rows or any(map(is_not, ops.samplers, last.samplers)):
            return None
        return PlainStep(self._layout, self._area, ops.positions)

    def keep(self, ops: PlainOps, layout: DrawLayout, area: Ints) -> None:
        """Let ops be repeated whose step has filled an area."""
        self._ops, self._layout, self._area = ops, layout, area
