"""Random calls of a plan's builder and random batches, most of them nearly valid.

All are drawn from one `random.Random`, which hypothesis or the seed of a fuzzer drives.
"""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.quant.formats import FORMATS, StoredTensor
from tests.backend.stored import random_stored

Array = NDArray[Any]
Maker = Callable[[Random], Any]
EXTREMES = [-(2**31), -1, 0, 1, 2, 31, 32, 33, 64, 2**30, 2**31 - 1]
SIZES = [*EXTREMES, 2**31, 2**40, 2**62, 2**63, 2**64 - 1]
ROWS = [(1, 0), (3, 2), (3, 61)]
"""(rows, tokens before them) of each sequence."""


def attempt(call: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a call is accepted. It may only raise these errors."""
    try:
        call(*arguments)
    except (ValueError, TypeError, MemoryError, OverflowError):
        return False
    return True


def one_of(*values: Any) -> Maker:
    return lambda rng: rng.choice(values)


def mostly(*values: Any) -> Maker:
    """One of the choices, or rarely an extreme number."""
    return lambda rng: rng.choice(EXTREMES) if rng.randrange(12) == 0 else rng.choice(values)


def several(*makers: Maker) -> Maker:
    return lambda rng: tuple(make(rng) for make in makers)


def near(right: tuple[Any, ...], *makers: Maker) -> Maker:
    """Arguments that are valid on a furnished plan, except for one or two."""

    def make(rng: Random) -> tuple[Any, ...]:
        changed = {rng.randrange(len(right)) for _ in range(rng.randrange(3))}
        return tuple(makers[i](rng) if i in changed else value for i, value in enumerate(right))

    return make


def spoilt(rng: Random, array: Array) -> Any:
    """Mostly the array, else an array of another length, dtype, shape or layout, or no array."""
    kind = rng.randrange(30)
    if kind < 20:
        return array
    others = [
        array[: rng.randrange(len(array) + 1)] if array.ndim else array,
        np.repeat(array, 2, axis=0)[::2] if array.ndim else array,
        array.astype(array.dtype.newbyteorder()),
        array.astype(np.float64),
        array.astype(np.int64),
        array.reshape(1, *array.shape),
        np.broadcast_to(array[:1], (2**33, *array.shape[1:]))[: 2**10] if array.size else array,
        array.tolist(),
        None,
        np.zeros(0, array.dtype),
    ]
    return others[kind - 20]


def ints(rng: Random, near: list[int]) -> Any:
    """Mostly the valid array, else one with a wrong number, or another object."""
    values = np.array(near, np.int32)
    if near and rng.randrange(16) == 0:
        values[rng.randrange(len(near))] = rng.choice(EXTREMES)
    return spoilt(rng, values) if rng.randrange(10) == 0 else values


def ids(rng: Random) -> list[int]:
    """Some ids of weights or vectors."""
    return [ID(rng) for _ in range(rng.choice([0, 1, 1, 2, 9]))]


@cache
def stored(name: str, rows: int, cols: int) -> StoredTensor:
    return random_stored(name, rows, cols, 0)


def weight(rng: Random) -> tuple[Any, ...]:
    name = rng.choice(
        [
            *(name for name, form in FORMATS.items() if not form.table_rows),
            "F32",
            "F32",
            "Q4_0",
            "Q8_0",
        ]
    )
    rows, cols = (
        rng.choice([16, 32, 33]),
        256 if FORMATS[name].block == 256 else rng.choice([32, 64]),
    )
    tensor = stored(name, rows, cols)
    order = (
        spoilt(rng, np.array(rng.sample(range(rows), rows), np.int64))
        if rng.randrange(4) == 0
        else None
    )
    scales = tensor.scales
    values = integers(rng, name)
    name = rng.choice(["Q4_0", "nonsense", ""]) if rng.randrange(20) == 0 else name
    codes = spoilt(rng, tensor.parts["codes"]) if rng.randrange(4) == 0 else tensor.parts["codes"]
    return name, mostly(rows)(rng), mostly(cols)(rng), codes, order, scales, values


def integers(rng: Random, name: str) -> Any:
    """The codebook of a format, or rarely another object."""
    found = FORMATS[name].integers
    if not found or rng.randrange(10) == 0:
        return rng.choice([None] * 9 + [np.zeros(16, np.int8)])
    return rng.choice(
        [found()] * 3 + [spoilt(rng, found()), np.full_like(found(), rng.choice([-128, 63, 62]))]
    )


def weight_pair(rng: Random) -> tuple[Any, ...]:
    name, rows, cols, codes, _, scales, values = weight(rng)
    other = weight(rng) if rng.randrange(3) == 0 else (name, rows, cols, codes, None, scales)
    return name, codes, scales, other[0], other[3], other[5], rows, cols, values


def table(rng: Random) -> _native.TableSpec:
    """A matrix with a table of scales, which a later call may fill."""
    codes = rng.choice(["2", "3", "4", "8", "e4m3", "2:4 int4", "2:4 int8", "2:4 bf16"])
    scales = "none" if codes == "2:4 bf16" else "f16"
    return _native.TableSpec(
        codes, rng.choice([16, 33]), rng.choice([32, 40, 64]), 32, scales, None
    )


def table_rows(rng: Random) -> tuple[Any, ...]:
    """Rows for the table matrix of a furnished plan, or for another."""
    codes, scales = np.zeros((16, 32), np.uint8), np.zeros((16, 2), np.uint8)
    if rng.randrange(3):
        return 4, rng.choice([0, 16]), codes, scales, None
    if rng.randrange(3) == 0:
        return sparse_rows(rng)
    return (
        ID(rng),
        mostly(0, 16)(rng),
        spoilt(rng, codes),
        spoilt(rng, scales),
        rng.choice([None, scales]),
    )


def sparse_rows(rng: Random) -> tuple[Any, ...]:
    """Rows for a 2:4 matrix, perhaps with damaged places."""
    cols, count = rng.choice([32, 40, 64]), rng.choice([16, 16, 33])
    num_scales, num_bytes = rng.choice([(-(-cols // 32), 1), (0, 2)])
    places = np.full((count, cols // 8), rng.choice([0x33, 0x5A, 0xC3]), np.uint8)
    return (
        ID(rng),
        mostly(0, 16)(rng),
        spoilt(rng, np.zeros((count, cols // 2 * num_bytes), np.uint8)),
        np.zeros((count, 2 * num_scales), np.uint8),
        None,
        spoilt(rng, places) if rng.randrange(2) else places,
    )


def table_blocks(rng: Random) -> tuple[Any, ...]:
    """Blocks for the second table matrix of a furnished plan, or for another."""
    name = rng.choice(["TQ1_0"] * 6 + ["TQ2_0", "IQ4_NL", "Q4_0", "?"])
    data = stored("TQ2_0" if name == "TQ2_0" else "TQ1_0", 33, 256).parts["codes"]
    order = (
        spoilt(rng, np.array(rng.sample(range(33), 33), np.int64))
        if rng.randrange(4) == 0
        else None
    )
    return mostly(5)(rng), name, spoilt(rng, data), order


WIDTH = mostly(1, 16, 32, 33, 64)
FLAG = one_of(False, True)
ROWS_OF = one_of("step", "step", "gathered", "logit", "pooled", "?")
ID = mostly(*range(-1, 10))
BIAS = mostly(-1, -1, -1, 0, 1, 2)
LAYER = several(mostly(0, 1, 2), mostly(0, 1))
NUMBER = one_of(1e-5, 0.0, 0.25, -1.0, 1e300, float("nan"), float("inf"))
HEAD_DIM = mostly(2, 16, 32)
ACTIVATION = one_of("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu", "?")
SCORING = one_of("softmax", "sigmoid", "?")
PART = mostly(1, 2, 4, 32)
EXPERTS = several(ids, ids, ids)
BUILDER: dict[str, Maker] = {
    "add_buffer": several(WIDTH, ROWS_OF, FLAG),
    "add_kv_group": several(
        *(mostly(1, 2), mostly(1, 2), HEAD_DIM, mostly(0, 2, 16, 32), mostly(0, 5), mostly(1, 9)),
        *(one_of("f32", "bf16", "int8", "int4", "k8v4", "?"), mostly(0, 0, 3, 40)),
    ),
    "add_program": several(),
    "add_table": several(table),
    "add_table_pair": several(table, table),
    "fill_table": table_rows,
    "fill_table_blocks": table_blocks,
    "set_key_rounding": lambda rng: (
        *(mostly(0, 1)(rng), mostly(0, 1)(rng), mostly(0, 1)(rng)),
        spoilt(rng, np.ones(rng.choice([16, 32]), np.float32)),
        spoilt(rng, np.ones(rng.choice([256, 1024]), np.float32)),
    ),
    "start_kv": several(),
    "use_float_activations": several(),
    "add_vector": lambda rng: (spoilt(rng, np.ones(rng.choice([16, 32, 64]), np.float32)),),
    "add_weight": weight,
    "add_weight_pair": weight_pair,
    "reserve_weights": several(one_of(*SIZES)),
    "embed": near((0, 1), ID, ID),
    "embed_position": near((0, 1), ID, ID),
    "input": near((0,), ID),
    "norm": near(
        (0, 6, 1, -1, "rms", 32, 1e-5),
        ID,
        ID,
        BIAS,
        BIAS,
        one_of("rms", "layer", "?"),
        mostly(16, 32, 1),
        NUMBER,
    ),
    "rope_angles": lambda rng: (
        [NUMBER(rng) for _ in range(rng.randrange(40))],
        NUMBER(rng),
        HEAD_DIM(rng),
    ),
    "rope": near((0, 6, 5, 16), ID, ID, ID, HEAD_DIM),
    "pack": near((1, 0), ID, ID),
    "gather_rows": near((3, 0), ID, ID),
    "add": near((0, 0, 6), ID, ID, ID),
    "glu": near((0, 0, 6, "silu"), ID, ID, ID, ACTIVATION),
    "activate": near((0, 6, "gelu"), ID, ID, ACTIVATION),
    "scale": near((0, 6, 0.5), ID, ID, NUMBER),
    "soft_cap": near((0, 6, 30.0), ID, ID, NUMBER),
    "gate_rows": near((0, 6, 7), ID, ID, ID),
    "linear": near((2, 1, 1, 2, -1, False), ID, ID, ID, BIAS, BIAS, FLAG),
    "linear_activate": near((0, 1, 0, 1, "relu"), ID, ID, ID, BIAS, ACTIVATION),
    "glu_linear": near((0, 1, 0, 0, -1, 1, "gelu_tanh"), ID, ID, ID, ID, BIAS, BIAS, ACTIVATION),
    "head_linear": near((2, 6, [0, 0]), ID, ID, ids),
    "concat_heads": near(
        (6, 4, 4, 1, 16, 16), ID, ID, ID, mostly(1, 2), mostly(1, 16, 32), mostly(1, 16, 32)
    ),
    "qkv_rope_write": near(
        (6, 1, 5, (0, 3, 3), (-1, 0, 0), (0, 0)),
        ID,
        ID,
        ID,
        several(ID, ID, ID),
        several(BIAS, BIAS, BIAS),
        LAYER,
    ),
    "kv_write": near((0, 6, (1, 1)), ID, BIAS, LAYER),
    "attention": near(
        (0, 6, (0, 0), 2, 16, 0.25, 30.0, [0.5, 0.25], 3),
        *(
            ID,
            ID,
            LAYER,
            mostly(1, 2, 3),
            mostly(8, 16, 32),
            NUMBER,
            NUMBER,
            one_of([], [0.5], [float("nan")] * 2),
            BIAS,
        ),
    ),
    "route": near(
        (4, 0, 8, "softmax", True, 1.0, (4, 2), 1),
        *(ID, ID, mostly(1, 8)),
        SCORING,
        FLAG,
        NUMBER,
        several(PART, PART),
        BIAS,
    ),
    "experts": near(
        (0, 6, 4, ([1], [1], [2]), ([2], [], [1]), "silu"), ID, ID, ID, EXPERTS, EXPERTS, ACTIVATION
    ),
    "expert_loads": several(one_of(*[0] * 9, 1, *EXTREMES)),
    "floats": several(ID, one_of(*EXTREMES)),
    "set_profiling": several(FLAG),
    "profile": several(),
    "move_slots": lambda rng: (mostly(0, 1)(rng), ints(rng, [0, 33]), ints(rng, [1, 2])),
}
"""Calls of a plan, each with a function that draws its arguments."""
FUNCTIONS: dict[str, Maker] = {
    "kv_block_bytes": several(one_of("f32", "int4", "?"), mostly(16), mostly(0, 16)),
    "packed_bytes": several(one_of("Q4_0", "Q6_K", "F32", "?"), mostly(32), mostly(256)),
    "vector_bytes": several(mostly(16)),
    "TableSpec": several(
        *(
            one_of("4", "lookup", "e5m2", "?"),
            mostly(32),
            mostly(64),
            mostly(16, 32),
            one_of("f16", "u8", "?"),
        ),
        *(one_of(None, "u8", "f32", "?"), one_of([], [0.5] * 16, [float("nan")] * 16)),
    ),
    "read_bandwidth": several(
        one_of(-1, 0, 1, 2, 1025, 2**31 - 1), one_of(0, 1, 4095, 8192, *SIZES[-4:])
    ),
    "dot_rate": several(one_of("", "int9"), mostly(1)),
    "Pool": several(one_of(-(2**31), -1, 0, 1, 2, 1025, 2**31 - 1)),
    "Plan": several(one_of("", "portable", "?"), one_of(-1, 0, 1, 2, 1025)),
    "philox": several(
        one_of((1, 2, 3, 4), (1, 2), (2**32,) * 4), one_of((0, 0), (-1, 0)), one_of("", "?")
    ),
}
"""Functions outside a plan that take numbers."""


def furnished(rng: Random | None) -> _native.Plan:
    """A plan with objects of every kind, so that random ids are often valid; without `rng`, it can
    run.
    """
    plan = _native.Plan(rng.choice(_native.isas()) if rng else "", rng.choice([1, 2]) if rng else 1)
    for head_dim, window, kv_dtype in (
        (16, 0, rng.choice(["f32", "bf16", "int4"]) if rng else "f32"),
        (32, 5, rng.choice(["int8", "int4"]) if rng else "int4"),
    ):
        plan.add_kv_group(2, 1, head_dim, head_dim, window, 2, kv_dtype, 3 if window else 0)
    plan.add_kv_group(1, 1, 64, 0, 0, 2, rng.choice(["f32", "bf16", "int4"]) if rng else "bf16")
    for rows, cols, name in ((32, 32, "Q8_0"), (64, 32, "F32"), (32, 64, "Q4_1"), (16, 32, "BF16")):
        tensor = stored(name, rows, cols)
        plan.add_weight(name, rows, cols, tensor.parts["codes"], None, tensor.scales)
    plan.add_table(_native.TableSpec("4", 32, 32, 32, "f16", None))
    plan.add_table(_native.TableSpec("2", 33, 256, 256, "f16", None))
    for width in (16, 32, 64, 2):
        plan.add_vector(np.ones(width, np.float32))
    buffers = (
        (32, "step", False),
        (32, "step", True),
        (64, "step", False),
        (32, "gathered", False),
        (16, "step", False),
    )
    for width, of, packed in buffers:
        plan.add_buffer(width, of, packed)
    if rng is None or rng.randrange(4):  # something that runs, for batches to try
        rows, packed, wide, gathered, narrow = range(5)
        angles, queries, gate = (
            plan.rope_angles([1.0, 0.1], 1.0, 16),
            *(plan.add_buffer(n, "step", False) for n in (32, 1)),
        )
        plan.embed(rows, 1)
        plan.norm(rows, rows, 1, 0, "layer", 16, 1e-5)
        plan.gate_rows(rows, rows, gate)
        plan.pack(packed, rows)
        plan.qkv_rope_write(queries, packed, angles, (0, 3, 3), (-1, 0, 0), (0, 0))
        plan.attention(rows, queries, (0, 0), 2, 16, 0.25)
        plan.kv_write(rows, queries, (1, 1))
        plan.attention(queries, rows, (1, 1), 1, 32, 0.2, 20.0, [0.1])
        plan.kv_write(wide, -1, (2, 0))
        plan.attention(queries, wide, (2, 0), 1, 32, 0.2)
        plan.linear(wide, packed, 1, 2, -1, False)
        plan.linear(narrow, packed, 3, 0, narrow, True)
        plan.route(narrow, rows, 8, "sigmoid", False, 1.0, (1, 1), 1)
        plan.experts(rows, queries, narrow, ([1, 1], [1, 1], [2, 2]), ([], [], []), "silu")
        plan.gather_rows(gathered, queries)
        for kind in ("logit", "pooled"):
            plan.norm(plan.add_buffer(32, kind, False), gathered, 1, 0, "layer", 16, 1e-5)
    return plan


def build(rng: Random, plan: _native.Plan) -> bool:
    """Make a random call of the builder, and return whether it was accepted."""
    table, owner = (FUNCTIONS, _native) if rng.randrange(20) == 0 else (BUILDER, plan)
    name = rng.choice(sorted(table))
    return attempt(getattr(owner, name), *table[name](rng))


def right_batch(rows: int, context: int) -> tuple[Any, ...]:
    """Valid arguments of a run."""
    near = [[1] * rows, range(context, context + rows), [0, rows], [context], [rows]]
    kv = ((np.arange(rows, dtype=np.int32), np.array([[0, 1]], np.int32)),) * 3
    return (
        *(np.array(values, np.int32) for values in near),
        kv,
        None,
        np.array([rows - 1], np.int32),
        np.array([0], np.int32),
        None,
        0,
    )


def batch(rng: Random) -> tuple[Any, ...]:
    rows, context = rng.choice(ROWS)
    scheduled = rng.choice([rows, 1])
    near = [[1] * rows, list(range(context, context + rows)), [0, rows], [context], [scheduled]]
    kv = tuple(
        (ints(rng, list(range(rows))), _table(rng)) for _ in range(rng.choice([3] * 20 + [0, 1, 4]))
    )
    inputs = rng.choice([None] * 8 + [np.ones((rows, 32), np.float32), np.ones((1, 1), np.float32)])
    program = rng.choice([0] * 150 + [1, *EXTREMES])
    pooled = ints(rng, list(range(rows))) if rng.randrange(3) == 0 else None
    return (
        *(ints(rng, values) for values in near),
        kv,
        _ancestors(rng, rows),
        ints(rng, [rows - 1]),
        pooled,
        inputs,
        program,
    )


def _table(rng: Random) -> Any:
    table = ints(rng, [0, 1])
    return table.reshape(1, -1) if isinstance(table, np.ndarray) and rng.randrange(40) else table


def _ancestors(rng: Random, rows: int) -> Any:
    trees = [
        None,
        np.array([[0], [1], [3]][:rows], np.uint64),
        np.full((rows, 2), 2**64 - 1, np.uint64),
        np.zeros((rows, 0), np.uint64),
    ]
    return rng.choice([None, None, *trees])
