"""Pipeline parallelism: a program cut into stages, between which goes what a layer leaves behind
(GPipe, Huang et al. 2018).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from headrace.errors import UnsupportedModelError
from headrace.program.collective import Receive, Send
from headrace.program.op import Op, StepSize, Value
from headrace.program.ops import Attention, KvWrite, RopeAngles
from headrace.program.trace import Program

Cost = Callable[[Op], float]


def read_bytes(op: Op) -> float:
    """What an op costs in a step of one row: decoding is bound by what is read."""
    return op.bytes(StepSize(((0, 1),), 1, 0))


def cut(
    program: Program,
    stages: int,
    layer_stages: Mapping[int, int] | None = None,
    cost: Cost = read_bytes,
) -> list[Program]:
    """The program in so many stages, of which the costliest is as cheap as can be; or with these
    layers in these stages.

    Each receives from the one before the values that it or a later one reads, runs its ops, and
    sends on; the last gives the results. Angles of rotation are computed anew in each, and layers
    keep their KV where they run. Every stage has all groups of KV, with the layers that are its
    own. Raises UnsupportedModelError where the program has fewer places to cut.
    """
    ops, alive = program.ops, _alive(program)
    places = _places(program, alive)
    if len(places) < stages - 1:
        raise UnsupportedModelError(
            f"{stages} stages cannot share a model that can be cut in {len(places)} places"
        )
    if layer_stages is None:
        ends = _evenly([cost(op) for op in ops], places, stages)
    else:
        ends = _after_layers(
            program,
            places,
            [
                {layer for layer, at in layer_stages.items() if at <= stage}
                for stage in range(stages - 1)
            ],
        )
    return [
        _stage(program, alive, number, start, end)
        for number, (start, end) in enumerate(pairwise([0, *ends]))
    ]


def _alive(program: Program) -> list[list[Value]]:
    """For each op: the values that are written before it, and read from it on or given back; no
    angles.
    """
    alive: list[list[Value]] = [[] for _ in program.ops]
    last = program.last_use()
    for i, op in enumerate(program.ops):
        if (out := op.output()) and not isinstance(op, RopeAngles):
            for values in alive[i + 1 : last.get(out.id, i) + 1]:
                values.append(out)
    return alive


def _places(program: Program, alive: list[list[Value]]) -> list[int]:
    """The ops that a stage may begin with: one between each two ops of attention, one before the
    first and one behind the last.

    It is the last before which the fewest numbers are alive, which is the end of a layer. All that
    is done with the KV of a layer is on one side of it.
    """
    last = {op.layer: i for i, op in enumerate(program.ops) if isinstance(op, Attention)}
    first = {
        op.layer: i for i, op in reversed(list(enumerate(program.ops))) if isinstance(op, KvWrite)
    }
    split = {i for layer, at in first.items() for i in range(at + 1, last.get(layer, at) + 1)}
    able = [
        i
        for i, values in enumerate(alive)
        if values and i not in split and all(value.rows == "step" for value in values)
    ]
    widths = {
        i: sum(value.width for value in alive[i])
        for i in able
        if not isinstance(program.ops[i], RopeAngles)
    }
    narrow = [i for i, width in widths.items() if width == min(widths.values())]
    attention = [i for i, op in enumerate(program.ops) if isinstance(op, Attention)]
    return list({bisect_left(attention, i): i for i in narrow}.values())


def _after_layers(program: Program, places: Sequence[int], layers: Sequence[set[int]]) -> list[int]:
    """The places behind these layers, and the end."""
    attention = {i: op.layer for i, op in enumerate(program.ops) if isinstance(op, Attention)}
    last = (max((i for i, layer in attention.items() if layer in own), default=0) for own in layers)
    return [*(places[bisect_right(places, i)] for i in last), len(program.ops)]


def _evenly(costs: Sequence[float], places: Sequence[int], stages: int) -> list[int]:
    """Where each stage ends, so that the costliest is as cheap as can be, and of equal choices the
    first stages are short.
    """
    sums = [0.0]
    for one in costs:
        sums.append(sums[-1] + one)

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sums[-1] - sums[start], (len(costs),)
        rests = [
            (end, best(end, left - 1))
            for end in places
            if end > start and sum(place > end for place in places) >= left - 2
        ]
        return min(
            (max(sums[end] - sums[start], most), (end, *ends)) for end, (most, ends) in rests
        )

    return list(best(0, stages)[1])


def _stage(
    program: Program, alive: list[list[Value]], number: int, start: int, end: int
) -> Program:
    ops, is_last = program.ops[start:end], end == len(program.ops)
    read = {value.id for op in ops for value in op.inputs()}
    angles = [op for op in program.ops[:start] if isinstance(op, RopeAngles) and op.out.id in read]
    received = [Receive(value, number - 1) for value in alive[start]]
    sent = [] if is_last else [Send(value, number + 1) for value in alive[end]]
    layers = {op.layer for op in ops if isinstance(op, Attention | KvWrite)}
    groups = (
        replace(group, layers=tuple(layer for layer in group.layers if layer in layers))
        for group in program.kv_groups
    )
    stage = replace(program, ops=(*received, *angles, *ops, *sent), shared_kv_groups=tuple(groups))
    return stage if is_last else replace(stage, logits=None, hidden=None, pooled=None)
