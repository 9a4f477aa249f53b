"""Programs cut into segments, so that a text is read a few layers at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from headrace.program.op import Op, Value
from headrace.program.ops import Attention, Input, KvWrite, RopeAngles
from headrace.program.trace import Program


class Segment(NamedTuple):
    program: Program
    """Starts with `Input` of the residual stream, except the first segment."""
    inputs: list[Value]
    """Values that the caller asked for."""
    result: Value
    """Input of the next segment."""


def cut_segments(
    program: Program, inputs: Sequence[Value], budget: int, cost: Callable[[Op], int]
) -> list[Segment]:
    """Cut a program so that the ops of a segment cost at most `budget`, if they can be cut.

    Ops after the last of the `inputs` are left out.
    """
    wanted = {value.id for value in inputs}
    writers = {out.id: i for i, op in enumerate(program.ops) if (out := op.output())}
    end = 1 + max(writers[id] for id in wanted)
    crossing = _crossing_values(program, end)

    starts, place, spent = [0], 0, 0
    for i, op in enumerate(program.ops[:end]):
        if i in crossing:
            place = i
        spent += cost(op)
        if spent > budget and place > starts[-1]:
            starts.append(place)
            spent = sum(map(cost, program.ops[place : i + 1]))

    result = []
    for start, stop in pairwise([*starts, end]):
        segment = _segment(program, start, stop, crossing.get(start))
        written = {out.id for op in segment.ops[start > 0 :] if (out := op.output())}
        last = crossing.get(stop, inputs[-1])
        result.append(Segment(segment, [v for v in inputs if v.id in written], last))
    return result


def _crossing_values(program: Program, end: int) -> dict[int, Value]:
    """The value that later ops read, by index of an op, if it is the only one."""
    ops = program.ops[:end]
    last_use = {value.id: i for i, op in enumerate(ops) for value in op.inputs()}
    inside_attention = _inside_attention(ops)
    crossing: dict[int, Value] = {}
    alive: dict[int, Value] = {}
    for i, op in enumerate(ops):
        if len(alive) == 1 and i not in inside_attention:
            (value,) = alive.values()
            if value.rows == "step":
                crossing[i] = value
        if (out := op.output()) and not isinstance(op, RopeAngles):
            alive[out.id] = out
        alive = {id: value for id, value in alive.items() if last_use.get(id, 0) > i}
    return crossing


def _inside_attention(ops: Sequence[Op]) -> set[int]:
    """Indexes of ops after the KV of a layer is written, and before it was read."""
    written: dict[int, int] = {}
    inside: set[int] = set()
    for i, op in enumerate(ops):
        if isinstance(op, KvWrite):
            written.setdefault(op.layer, i)
        elif isinstance(op, Attention):
            inside.update(range(written.get(op.layer, i) + 1, i + 1))
    return inside


def _segment(program: Program, start: int, end: int, first: Value | None) -> Program:
    ops = program.ops[start:end]
    read = {value.id for op in ops for value in op.inputs()}
    angles = [op for op in program.ops[:start] if isinstance(op, RopeAngles) and op.out.id in read]
    layers = {op.layer for op in ops if isinstance(op, Attention | KvWrite)}
    groups = (
        replace(group, layers=tuple(layer for layer in group.layers if layer in layers))
        for group in program.kv_groups
    )
    return replace(
        program,
        ops=(*([Input(first)] if first else []), *angles, *ops),
        logits=None,
        shared_kv_groups=tuple(groups),
    )
