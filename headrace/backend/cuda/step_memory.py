"""GPU memory that steps of a program need, counted without a GPU and without torch."""

from collections.abc import Callable, Hashable

from headrace.backend.cuda.attention_tiles import Tiles
from headrace.backend.cuda.attention_work import min_partials
from headrace.backend.cuda.step_shape import Rows, StepShape
from headrace.program import collective, moe, ops
from headrace.program.kv import KvGroup
from headrace.program.op import RowKind, Value
from headrace.program.trace import Program

FIXED_BYTES = 512 << 20
"""For kernels, graphs, matrices of adapters and the allocator's rounding."""
_MAX_DRAFT_TOKENS = 1024
"""Per sequence, as options limit them."""


def step_bytes(program: Program, shape: StepShape, tiles_of: Callable[[KvGroup], Tiles]) -> int:
    """Bytes of a lowered program's values, of scratch of single ops, and of what is fixed."""
    rows, places = shape.counts, value_places(program, lambda value: None)
    outs = [out for op in program.ops if (out := op.output())]
    values = {(places[out.id], out.width, out.rows): rows[out.rows] * out.width for out in outs}
    widest = max(
        (
            sum(w.rows for w in op.matrices())
            for op in program.ops
            if isinstance(op, ops.QkvRopeWrite | ops.GluLinear)
        ),
        default=0,
    )
    experts = [
        op.top_k * (op.down[0].cols + op.out.width)
        for op in program.ops
        if isinstance(op, moe.Experts)
    ]
    numbers = sum(values.values()) + shape.rows * (widest + max(experts, default=0))
    numbers += _partial_numbers(program, shape, tiles_of) + _gathered_numbers(program, rows)
    if program.logits:
        numbers += shape.logit_rows * program.logits.width  # adjusted by penalties
    return FIXED_BYTES + 4 * numbers


def value_places(program: Program, dtype_of: Callable[[Value], Hashable]) -> dict[int, str]:
    """The name of each value's tensor, by value id. Values reuse the tensors of dead values of
    equal width, rows and type.
    """
    places: dict[int, str] = {}
    last_use, free = program.last_use(), dict[tuple[int, RowKind, Hashable], list[str]]()
    kept = {value.id for value in program.results}

    def kind(value: Value) -> tuple[int, RowKind, Hashable]:
        return value.width, value.rows, dtype_of(value)

    for index, op in enumerate(program.ops):
        if out := op.output():
            spare = free.get(kind(out))
            name = "result" if out.id in kept else "value"
            places[out.id] = spare.pop() if spare and name == "value" else f"{name} {len(places)}"
        for value in {value.id: value for value in op.inputs()}.values():
            if last_use[value.id] == index and value.id not in kept:
                free.setdefault(kind(value), []).append(places[value.id])
    return places


def num_partials(shape: StepShape, tiles: Tiles) -> int:
    """Size that holds the partial results of any batch, and spreads long contexts."""
    rows = shape.rows
    max_draft_tokens = min(rows, _MAX_DRAFT_TOKENS) if shape.has_trees else 0
    return min_partials(rows, max_draft_tokens, tiles.split) + tiles.min_units


def _gathered_numbers(program: Program, rows: Rows) -> int:
    """Numbers of the largest exchange between ranks, as it arrives."""
    gathered = [0]
    for op in program.ops:
        match op:
            case collective.AllGather():
                widest = max(last - first for first, last in op.parts)
                gathered.append(len(op.parts) * rows[op.out.rows] * widest)
            case collective.OwnedRows() | collective.OwnedExperts():
                gathered.append(len(op.parts) * rows[op.out.rows] * op.out.width)
            case collective.ColumnsToRows() | collective.GatherShares():
                gathered.append(rows[op.out.rows] * op.out.width)
    return max(gathered)


def _partial_numbers(
    program: Program, shape: StepShape, tiles_of: Callable[[KvGroup], Tiles]
) -> int:
    # All layers share the partial results.
    max_numbers = 0
    for op in program.ops:
        if isinstance(op, ops.Attention):
            group = next(group for group in program.kv_groups if op.layer in group.layers)
            partials = num_partials(shape, tiles_of(group))
            max_numbers = max(max_numbers, partials * op.num_heads * (op.head_dim + 2))
    return max_numbers
