"""Ops, values, weights and step sizes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

from headrace.record import frozen

Kind = Literal["int8", "bf16", "f32"]
"""Number formats of multiply-adds."""
RowKind = Literal["step", "gathered", "logit", "pooled"]
"""All rows of the step, the gathered rows (logit rows, then pooled rows), or either kind."""


class StepSize(NamedTuple):
    """Numbers that costs depend on."""

    seqs: tuple[tuple[int, int], ...]  # (tokens with KV before the step, rows) of each sequence
    logit_rows: int
    kv_bytes: float  # bytes of one stored key or value number
    pooled_rows: int = 0

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.seqs)


@frozen
class Value:
    """A matrix [rows, width] that one op writes and others read."""

    id: int
    width: int
    rows: RowKind
    packed: bool = False
    """Whether only linear ops read it, in any form of the backend."""

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
    """A stored tensor [rows, cols]; a vector [cols] has rows = 1."""

    name: str
    rows: int
    cols: int
    nbytes: int
    """Bytes in the file, or in the backend's memory after lowering."""
    kind: Kind = "f32"
    copy_nbytes: int = 0
    """Bytes of its copy after lowering, if an op reads it in part."""
    whole_rows: int = 0
    """Rows of the whole matrix, if this is a rank's share of one; else 0."""


@frozen
class Op:
    """Base class of all ops. The output value is the field `out`."""

    @property
    def name(self) -> str:
        """Name in profiles: `qkv_rope_write` for QkvRopeWrite."""
        return re.sub(r"\B[A-Z]", r"_\g<0>", type(self).__name__).lower()

    def inputs(self) -> list[Value]:
        return [v for name, v in vars(self).items() if name != "out" and isinstance(v, Value)]

    def output(self) -> Value | None:
        return vars(self).get("out")

    def weights(self) -> list[Weight]:
        return [*self.matrices(), *self.vectors()]

    def matrices(self) -> list[Weight]:
        """Weights that rows are multiplied with or copied from."""
        return self._weights(is_bias=False)

    def copies(self) -> list[Weight]:
        """Matrices that the backend keeps twice, to read a part of them."""
        return []

    def vectors(self) -> list[Weight]:
        """Weights that are used element by element."""
        return self._weights(is_bias=True)

    def _weights(self, *, is_bias: bool) -> list[Weight]:
        # Plans ask for the weights of an op many thousand times.
        return [
            weight
            for name, value in vars(self).items()
            if type(value) in (Weight, tuple) and _is_bias(name) is is_bias
            for weight in _weights_in(value)
        ]

    def with_weights(self, new: Mapping[str, Weight]) -> Self:
        return replace(self, **{name: _replaced(value, new) for name, value in vars(self).items()})

    def flops(self, step: StepSize) -> int:
        return 0

    def bytes(self, step: StepSize) -> int:
        return sum(weight.nbytes for weight in self.weights())

    def link_bytes(self, step: StepSize) -> int:
        """Bytes from other ranks (`collective.py`)."""
        return 0


def _is_bias(field: str) -> bool:
    return field.endswith("bias")


def _weights_in(field: object) -> Iterator[Weight]:
    if isinstance(field, Weight):
        yield field
    elif isinstance(field, tuple):
        for part in field:
            yield from _weights_in(part)


def _replaced(field: Any, new: Mapping[str, Weight]) -> Any:
    if isinstance(field, Weight):
        return new[field.name]
    if isinstance(field, tuple):
        return tuple(_replaced(part, new) for part in field)
    return field
