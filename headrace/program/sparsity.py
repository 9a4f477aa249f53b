"""Programs that read fewer weights, because some activations are zero.

`with_skipped_zeros` is exact: it leaves out what a zero multiplies. `with_thresholds` is lossy: it
sets small activations to zero first (TEAL, Liu et al. 2024).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count

from headrace.program.op import Op, Value
from headrace.program.ops import (
    Activate,
    Activation,
    Glu,
    GluLinear,
    Linear,
    LinearAdd,
    Threshold,
)
from headrace.program.trace import Program

ZERO_ACTIVATIONS: tuple[Activation, ...] = ("relu",)
"""Activations that are exactly 0 for some numbers."""
RELU_DENSITY = 0.1
"""Share of numbers that a ReLU leaves, in models that were trained with it: 3 to 12 % (Mirzadeh et
al. 2023). Only predicted costs depend on it.
"""

_SPARSE_INPUT = re.compile(r"(?:draft\.)?(layers\.\d+\.(?:q|k|v|o|gate|up|down))")
"""Names of matrices, also of those that only a self-draft has."""


def has_zero_activations(program: Program) -> bool:
    return any(
        isinstance(op, Glu | Activate) and op.activation in ZERO_ACTIVATIONS for op in program.ops
    )


def with_skipped_zeros(program: Program) -> Program:
    """Leave out the rows of `up` and the columns of `down` that meet a 0 after a ReLU."""
    zeros: set[int] = set()

    def marked(op: Op) -> Op:
        if isinstance(op, Glu | Activate) and op.activation in ZERO_ACTIVATIONS:
            zeros.add(op.out.id)
            if isinstance(op, Glu) and op.gate != op.up:
                return replace(op, density=RELU_DENSITY)
        if isinstance(op, Linear) and op.x.id in zeros:
            return replace(op, density=RELU_DENSITY)
        return op

    return replace(program, ops=tuple(marked(op) for op in program.ops))


def sparse_inputs(program: Program) -> dict[str, Value]:
    """The inputs that a threshold may thin out, by the name of the first matrix that reads each:
    of attention (`layers.0.q`), its output matrix (`o`), the MLP (`gate`, `up`) and `down`.
    """
    names: dict[int, str] = {}
    values: dict[str, Value] = {}
    for op in program.ops:
        if not isinstance(op, Linear) or op.x.id in names:
            continue
        if match := _SPARSE_INPUT.fullmatch(op.weight.name):
            names[op.x.id] = match[1]
            values[match[1]] = op.x
    return values


def with_thresholds(program: Program, thresholds: Mapping[str, float], density: float) -> Program:
    """Set activations up to a threshold to 0. `thresholds`: by the names of `sparse_inputs`.

    `density` is the expected share of the others.
    """
    ids = _new_ids(program)
    thinned = {
        value.id: (replace(value, id=next(ids)), thresholds[name])
        for name, value in sparse_inputs(program).items()
        if thresholds.get(name, 0) > 0
    }
    return replace(program, ops=tuple(_thinned(program, thinned, density)))


def _thinned(
    program: Program, thinned: Mapping[int, tuple[Value, float]], density: float
) -> Iterator[Op]:
    for op in program.ops:
        if (
            isinstance(op, Linear)
            and op.x.id in thinned
            and _SPARSE_INPUT.fullmatch(op.weight.name)
        ):
            yield replace(op, x=thinned[op.x.id][0], density=density)
        else:
            yield op
        out = op.output()
        if out and out.id in thinned:
            value, least = thinned[out.id]
            yield Threshold(value, out, least)


def _new_ids(program: Program) -> Iterator[int]:
    return count(1 + max(out.id for op in program.ops if (out := op.output())))


def dense(program: Program) -> Program:
    """The program for a backend that reads whole matrices."""
    kept = (Linear, LinearAdd, Glu, GluLinear)
    ops = (replace(op, density=1.0) if isinstance(op, kept) else op for op in program.ops)
    return replace(program, ops=tuple(ops))
