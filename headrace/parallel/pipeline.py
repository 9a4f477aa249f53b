"""Pipeline parallelism: a program cut into stages (GPipe, Huang et al. 2018)."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from headrace.errors import UnsupportedModelError
from headrace.program.collective import Receive, Send
from headrace.program.op import Op, StepSize, Value
from headrace.program.ops import Attention, ConcatHeads, KvWrite, RopeAngles
from headrace.program.trace import Program

Cost = Callable[[Op], float]


def decode_bytes(op: Op) -> float:
    return op.bytes(StepSize(((0, 1),), 1, 0))


def cut(
    program: Program,
    stages: int,
    layer_stages: Mapping[int, int] | None = None,
    cost: Cost = decode_bytes,
) -> list[Program]:
    """Cut by `layer_stages`, or so that the maximum cost of a stage is least.

    Raises UnsupportedModelError if the program has too few cut points.
    """
    live = _live_values(program)
    cut_points = _cut_points(program, live)
    if len(cut_points) < stages - 1:
        raise UnsupportedModelError(
            f"{stages} stages cannot share a model that can be cut in {len(cut_points)} places"
        )
    if layer_stages is None:
        ends = _balanced_ends([cost(op) for op in program.ops], cut_points, stages)
    else:
        layers = [
            {layer for layer, number in layer_stages.items() if number <= stage}
            for stage in range(stages - 1)
        ]
        ends = _ends_after_layers(program, cut_points, layers)
    return [
        _stage(program, live, number, start, end)
        for number, (start, end) in enumerate(pairwise([0, *ends]))
    ]


def _live_values(program: Program) -> list[list[Value]]:
    live: list[list[Value]] = [[] for _ in program.ops]
    last_use = program.last_use()
    for i, op in enumerate(program.ops):
        if (out := op.output()) and not isinstance(op, RopeAngles):
            for values in live[i + 1 : last_use.get(out.id, i) + 1]:
                values.append(out)
    return live


def _cut_points(program: Program, live: list[list[Value]]) -> list[int]:
    """A stage begins at the op with the fewest live numbers in a layer."""
    attention = {op.layer: i for i, op in enumerate(program.ops) if isinstance(op, Attention)}
    first_write = {
        op.layer: i for i, op in reversed(list(enumerate(program.ops))) if isinstance(op, KvWrite)
    }
    between_kv_ops = {
        i
        for layer, first in first_write.items()
        for i in range(first + 1, attention.get(layer, first) + 1)
    }
    rows_of_taps = _rows_of_taps(program)
    widths = {
        i: sum(value.width for value in values if i <= rows_of_taps.get(value.id, i))
        for i, values in enumerate(live)
        if values
        and i not in between_kv_ops
        and all(value.rows == "step" for value in values)
        and not isinstance(program.ops[i], RopeAngles)
    }
    min_width = min(widths.values(), default=0)
    attention_ops = [i for i, op in enumerate(program.ops) if isinstance(op, Attention)]
    # The last stage has a layer, also of a model that keeps all rows before its head.
    narrow = [i for i, width in widths.items() if width == min_width and i <= max(attention_ops)]
    # The last of the narrow ops between two attentions replaces the others.
    return list({bisect_left(attention_ops, i): i for i in narrow}.values())


def _rows_of_taps(program: Program) -> dict[int, int]:
    """The last reader of each value that a drafter's rows keep longer, by id.

    These rows pass through all stages, so they do not make a place wider than another.
    """
    if not program.taps:
        return {}
    kept, joins = {program.taps.id}, set[int]()
    for i, op in reversed(list(enumerate(program.ops))):
        out = op.output()
        if out and out.id in kept and isinstance(op, ConcatHeads):
            kept |= {value.id for value in op.inputs()}
            joins.add(i)
    last = dict.fromkeys(kept, -1)
    for i, op in enumerate(program.ops):
        if i not in joins:
            last |= {value.id: i for value in op.inputs() if value.id in kept}
    return last


def _ends_after_layers(
    program: Program, cut_points: Sequence[int], layers: Sequence[set[int]]
) -> list[int]:
    attention = {i: op.layer for i, op in enumerate(program.ops) if isinstance(op, Attention)}
    last_ops = (
        max((i for i, layer in attention.items() if layer in stage_layers), default=0)
        for stage_layers in layers
    )
    return [*(cut_points[bisect_right(cut_points, i)] for i in last_ops), len(program.ops)]


def _balanced_ends(costs: Sequence[float], cut_points: Sequence[int], stages: int) -> list[int]:
    sums = list(accumulate(costs, initial=0.0))

    @cache
    def best(start: int, stages_left: int) -> tuple[float, tuple[int, ...]]:
        if stages_left == 1:
            return sums[-1] - sums[start], (len(costs),)
        rests = [
            (end, best(end, stages_left - 1))
            for end in cut_points
            if end > start and sum(point > end for point in cut_points) >= stages_left - 2
        ]
        return min(
            (max(sums[end] - sums[start], max_cost), (end, *ends))
            for end, (max_cost, ends) in rests
        )

    return list(best(0, stages)[1])


def _stage(program: Program, live: list[list[Value]], number: int, start: int, end: int) -> Program:
    ops, is_last = program.ops[start:end], end == len(program.ops)
    read = {value.id for op in ops for value in op.inputs()}
    angles = [op for op in program.ops[:start] if isinstance(op, RopeAngles) and op.out.id in read]
    received = [Receive(value, number - 1) for value in live[start]]
    sent = [] if is_last else [Send(value, number + 1) for value in live[end]]
    layers = {op.layer for op in ops if isinstance(op, Attention | KvWrite)}
    groups = (
        replace(group, layers=tuple(layer for layer in group.layers if layer in layers))
        for group in program.kv_groups
    )
    stage = replace(program, ops=(*received, *angles, *ops, *sent), shared_kv_groups=tuple(groups))
    return stage if is_last else replace(stage, logits=None, hidden=None, pooled=None, taps=None)
