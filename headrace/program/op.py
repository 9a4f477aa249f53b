"""Ops, the values and weights that they read and write, and the step size that costs depend on."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

from headrace.record import frozen

Kind = Literal["int8", "bf16", "f32"]
"""Number formats of multiply-adds: VNNI and its like, BF16 dot products, float32 FMA."""
RowKind = Literal["step", "gathered", "logit", "pooled"]
"""Which rows of a step a value has: all; those that are gathered, of which the first have logits
and the others are pooled; or one of these two kinds alone.
"""


class StepSize(NamedTuple):
    """Numbers of a step that the cost of its ops depends on."""

    seqs: tuple[tuple[int, int], ...]  # (tokens with KV before the step, rows) of each sequence
    logit_rows: int
    kv_bytes: float  # bytes of one stored key or value number
    pooled_rows: int = 0

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.seqs)


@frozen
class Value:
    """A matrix of rows. A packed value is read by linear ops alone, so a
    backend may keep it in the form that its kernels read (quantised, say) and never as float32.
    """

    id: int
    width: int
    rows: RowKind
    packed: bool = False

    def num_rows(self, step: StepSize) -> int:
        match self.rows:
            case "step":
                return step.rows
            case "gathered":
                return step.logit_rows + step.pooled_rows
            case "logit":
                return step.logit_rows
            case "pooled":
                return step.pooled_rows


@frozen
class Weight:
    """A reference to a stored tensor [rows, cols], or [cols] with rows = 1."""

    name: str
    rows: int
    cols: int
    nbytes: int
    """Bytes as stored; in a program that a backend has lowered, bytes in that backend's memory."""
    kind: Kind = "f32"
    """Number format of the multiply-adds with this weight."""


@frozen
class Op:
    """Base of all ops. By convention the output field is called `out`."""

    @property
    def name(self) -> str:
        """What profiles call it: `qkv_rope_write`."""
        return re.sub(r"\B[A-Z]", r"_\g<0>", type(self).__name__).lower()

    def inputs(self) -> list[Value]:
        return [v for name, v in vars(self).items() if name != "out" and isinstance(v, Value)]

    def output(self) -> Value | None:
        return vars(self).get("out")

    def weights(self) -> list[Weight]:
        return [*self.matrices(), *self.vectors()]

    def matrices(self) -> list[Weight]:
        """The weights that rows are multiplied with or taken from."""
        return [
            w
            for name, value in vars(self).items()
            if not _is_bias(name)
            for w in _weights_in(value)
        ]

    def vectors(self) -> list[Weight]:
        """The weights that are added to or multiplied with whole rows, number by number."""
        return [
            w for name, value in vars(self).items() if _is_bias(name) for w in _weights_in(value)
        ]

    def with_weights(self, new: Mapping[str, Weight]) -> Self:
        """The same op with each of its weights replaced by the new one of that name."""
        return replace(self, **{name: _replaced(value, new) for name, value in vars(self).items()})

    def flops(self, step: StepSize) -> int:
        return 0

    def bytes(self, step: StepSize) -> int:
        return sum(w.nbytes for w in self.weights())

    def link_bytes(self, step: StepSize) -> int:
        """Bytes that this rank receives from others: see `collective.py`."""
        return 0


def _is_bias(field: str) -> bool:
    return field.endswith("bias")


def _weights_in(value: object) -> Iterator[Weight]:
    """The weights that a field of an op holds: none, one, or those of a tuple."""
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _weights_in(part)


def _replaced(value: Any, new: Mapping[str, Weight]) -> Any:
    if isinstance(value, Weight):
        return new[value.name]
    return tuple(_replaced(part, new) for part in value) if isinstance(value, tuple) else value
