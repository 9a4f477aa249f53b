"""Single ops of families other than Llama: the cpu backend equals the reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.backend import forward
from headrace.backend.cpu import executable as cpu
from headrace.backend.reference import executable as reference
from headrace.config import KvConfig
from headrace.program import ops
from headrace.program.op import Value
from headrace.program.trace import Program, Tracer, trace
from headrace.quant.formats import StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored

ISAS = _native.isas()
ACTIVATIONS: list[ops.Activation] = [
    name for name in get_args(ops.Activation) if name != "clamped_swiglu"
]
KV = KvConfig((), 32, "f32")
SPECIAL = [
    0.0,
    -0.0,
    1e-30,
    -1e-30,
    0.5,
    -0.5,
    3.0,
    -3.0,
    7.5,
    -7.5,
    12.0,
    -12.0,
    30.0,
    -30.0,
    1e4,
    -1e4,
    1e18,
    -1e18,
]
NOT_FINITE = [np.float32(x) for x in (np.nan, -np.nan, np.inf, -np.inf)]

Floats = NDArray[np.float32]
Tensors = dict[str, StoredTensor]


def run(
    program: Program, tensors: Tensors, x: Floats, isa: str, threads: int = 1
) -> tuple[Floats, Floats, Floats]:
    """Logits of a prompt with these input rows: reference, cpu fused, cpu unfused."""
    sequence = Sequence([*range(len(x) // 32 + 1)], 32)
    batch = batch_of([sequence], [[0] * len(x)], [([], [])], trees=False)._replace(kv=(), inputs=x)
    truth = reference.compile(program, tensors, KV, 1)
    fused, plain = (
        cpu.CpuExecutable(program, tensors, KV, threads, isa, lower=lower)
        for lower in (cpu.lower, cpu.lower_unfused)
    )
    with np.errstate(all="ignore"):
        want, got, same = (
            forward(executable, batch).logits.copy() for executable in (truth, fused, plain)
        )
    return want, got, same


def alone(
    op: Callable[[Tracer, Value], Value], x: Floats, isa: str, tensors: Tensors | None = None
) -> tuple[Floats, Floats]:
    """The result of one op for input rows, by the reference and by `cpu`."""
    want, got, same = run(
        trace(lambda g: op(g, g.input(x.shape[1])), tensors or {}), tensors or {}, x, isa
    )
    assert np.array_equal(got, same, equal_nan=True)
    return want, got


def vector(name: str, size: int, seed: int) -> StoredTensor:
    return replace(random_stored("F32", 1, size, seed, name, 1.0), shape=(size,))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(get_args(ops.NormKind)),
    size=st.sampled_from([1, 2, 15, 16, 17, 64, 80, 128, 200]),
    groups=st.sampled_from([1, 2, 5]),
    whole=st.booleans(),
    bias=st.sampled_from([None, "size", "whole"]),
    packs=st.booleans(),
    shift=st.sampled_from([0.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_norm_equals_reference(
    isa: str,
    kind: Any,
    size: int,
    groups: int,
    whole: bool,
    bias: str | None,
    packs: bool,
    shift: float,
    seed: int,
) -> None:
    """For LayerNorm, the mean may be much larger than the deviations."""
    width = size * groups
    sizes = {"w": width if whole else size, "b": width if bias == "whole" else size}
    tensors = {name: vector(name, n, i) for i, (name, n) in enumerate(sizes.items())}
    tensors["o"] = random_stored("F32", 20, width, 3, "o", 1.0)

    def op(g: Tracer, x: Value) -> Value:
        y = g.norm(
            x,
            g.vector("w", sizes["w"]),
            1e-5,
            kind,
            bias=g.vector("b", sizes["b"]) if bias else None,
            size=size,
        )
        return g.linear(y, g.weight("o", 20, width)) if packs else y

    x = (shift + np.random.default_rng(seed).standard_normal((5, width))).astype(np.float32)
    want, got = alone(op, x, isa, tensors)
    np.testing.assert_allclose(
        got, want, rtol=1e-4, atol=2e-5 * (1 + shift) * max(1.0, np.abs(want).max())
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", get_args(ops.NormKind))
@pytest.mark.parametrize("size", [5, 16, 64])
def test_norm_keeps_not_finite_numbers_in_their_row(isa: str, kind: Any, size: int) -> None:
    """Only the groups of columns with such a number are affected."""
    tensors = {"w": vector("w", size, 0)}
    x = np.random.default_rng(1).standard_normal((3, 2 * size)).astype(np.float32)

    def normed(x: Floats) -> Floats:
        return alone(
            lambda g, y: g.norm(y, g.vector("w", size), 1e-5, kind, size=size), x, isa, tensors
        )[1]

    good = normed(x)
    for bad in (*NOT_FINITE, np.float32(1e30), np.float32(3e38)):
        x[1, size // 2] = bad
        got = normed(x)
        assert not np.isfinite(got[1, :size]).any()
        assert np.array_equal(got[[0, 2]], good[[0, 2]]) and np.array_equal(
            got[1, size:], good[1, size:]
        )


def spread(cols: int) -> Floats:
    """Rows with numbers of all magnitudes."""
    numbers = np.concatenate(
        [SPECIAL, np.linspace(-15, 15, 6001), np.random.default_rng(0).standard_normal(999)]
    )
    return np.resize(numbers, (len(numbers) // cols + 1, cols)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_equals_reference(isa: str, activation: ops.Activation) -> None:
    """To a relative error of 1e-6, and a little more far below 0; silu uses a cheaper
    exponential.
    """
    x = spread(37)
    want, got = alone(lambda g, y: g.activate(y, activation), x, isa)
    far = {"silu": 1e-5, "gelu": 2e-6, "gelu_tanh": 2e-5, "relu": 0}[activation]
    near = {"silu": 1e-5, "gelu": 1e-6, "gelu_tanh": 2e-6, "relu": 0}[activation]
    np.testing.assert_allclose(got, want, rtol=far, atol=1e-16 if activation == "silu" else 1e-36)
    np.testing.assert_allclose(got[x > -5], want[x > -5], rtol=near, atol=1e-36)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", get_args(ops.Activation))
def test_glu_equals_reference(isa: str, activation: ops.Activation) -> None:
    x = spread(34)[:, :34]

    def op(g: Tracer, y: Value) -> Value:
        halves = [g.linear(y, g.weight(name, 17, 34)) for name in ("first", "last")]
        return g.glu(*halves, activation)

    eye = np.eye(34, dtype=np.float32)
    tensors = {
        name: StoredTensor.from_floats(name, part)
        for name, part in (("first", eye[:17]), ("last", eye[17:]))
    }
    x[np.abs(x) > 1e17] = 2.0
    want, got = alone(op, x, isa, tensors)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-20)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", get_args(ops.Activation))
def test_activation_of_not_finite_numbers(isa: str, activation: ops.Activation) -> None:
    plan = _native.Plan(isa, 1)
    numbers = np.array(
        [[*NOT_FINITE, *[1.0] * 6, -2.0, *NOT_FINITE], [*[2.0] * 10, 0.0, *NOT_FINITE]], np.float32
    )
    x, y = (plan.add_buffer(15, "step", False) for _ in range(2))
    for buffer, values in ((x, numbers), (y, numbers[::-1].copy())):
        plan.embed(buffer, plan.add_weight("F32", 2, 15, values.view(np.uint8).reshape(-1), None))
    plan.glu(y, x, y, activation)
    if activation != "clamped_swiglu":
        plan.activate(x, x, activation)
    plan.run(
        *(np.array(ints, np.int32) for ints in ([0, 1], [0, 1], [0, 2], [0], [2])),
        (),
        None,
        np.zeros(0, np.int32),
    )
    bad = ~np.isfinite(numbers)
    assert np.array_equal(~np.isfinite(plan.floats(y, 2)), bad | bad[::-1])
    if activation != "clamped_swiglu":
        assert np.array_equal(~np.isfinite(plan.floats(x, 2)), bad)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_soft_cap_equals_reference(isa: str, cap: float) -> None:
    x = spread(19)
    want, got = alone(lambda g, y: g.soft_cap(y, cap), x, isa)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-30)
    bad = np.array([[*NOT_FINITE]], np.float32)
    assert not np.isfinite(alone(lambda g, y: g.soft_cap(y, cap), bad, isa)[1]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_scale_and_gated_rows(isa: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 33)).astype(np.float32) * 4
    tensors = {"g": random_stored("F32", 1, 33, 0, "g", 1.0)}
    want, got = alone(lambda g, y: g.scale(y, 0.37), x, isa)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    want, got = alone(
        lambda g, y: g.gate_rows(g.scale(y, 2.0), g.linear(y, g.weight("g", 1, 33))),
        x,
        isa,
        tensors,
    )
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for bad in NOT_FINITE:
        x[3, 3] = bad
        spoilt = alone(
            lambda g, y: g.gate_rows(g.scale(y, 2.0), g.linear(y, g.weight("g", 1, 33))),
            x,
            isa,
            tensors,
        )[1]
        assert not np.isfinite(spoilt[3]).any() and np.array_equal(
            np.delete(spoilt, 3, 0), np.delete(got, 3, 0)
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["F32", "Q8_0"])
def test_learned_positions(isa: str, format: str) -> None:
    """Positions beyond the last row use the last row."""
    tensors = {"p": random_stored(format, 9, 64, 0, "p", 1.0)}
    x = np.random.default_rng(0).standard_normal((13, 64)).astype(np.float32)
    want, got = alone(
        lambda g, y: g.add(y, g.embed_position(g.weight("p", 9, 64))), x, isa, tensors
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[9:] - x[9:], np.broadcast_to(got[8] - x[8], (4, 64)), atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["F32", "Q4_0", "I8_ROW"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_activate_equals_reference(
    isa: str, format: str, activation: ops.Activation
) -> None:
    """Fused and unfused programs give the same bits, on any threads, among any rows."""
    shapes = {"up": (96, 64), "down": (64, 96)}
    tensors = {
        name: random_stored(format, *shape, i, name)
        for i, (name, shape) in enumerate(shapes.items())
    }
    tensors |= {
        f"{name}.bias": vector(f"{name}.bias", shape[0], 7) for name, shape in shapes.items()
    }

    def mlp(g: Tracer) -> Value:
        x = g.input(64)
        up = g.linear(x, g.weight("up", 96, 64), g.vector("up.bias", 96))
        return g.add(
            x,
            g.linear(
                g.activate(up, activation), g.weight("down", 64, 96), g.vector("down.bias", 64)
            ),
        )

    program = trace(mlp, tensors)
    assert [type(op) for op in cpu.lower(program, tensors).ops] == [
        ops.Input,
        ops.LinearActivate,
        ops.LinearAdd,
    ]
    x = np.random.default_rng(0).standard_normal((21, 64)).astype(np.float32)
    want, got, same = run(program, tensors, x, isa)
    assert np.array_equal(got, same) and np.array_equal(
        got, run(program, tensors, x, isa, threads=2)[1]
    )
    assert np.linalg.norm(got - want) <= (1e-5 if format == "F32" else 0.02) * np.linalg.norm(want)
    assert np.array_equal(got[4:9], run(program, tensors, x[4:9], isa)[1])


@pytest.mark.parametrize(("call", "arguments", "message"), [
    ("norm", (0, 0, 0, -1, "other", 32, 1e-5), "kind of norm"),
    ("norm", (0, 0, 0, -1, "rms", 20, 1e-5), "whole groups"),
    ("norm", (0, 0, 0, -1, "rms", 0, 1e-5), "whole groups"),
    ("norm", (0, 0, 0, -1, "rms", 32, -1.0), "epsilon"),
    ("norm", (0, 0, 1, -1, "rms", 32, 1e-5), "a vector of a norm"),
    ("norm", (0, 0, 0, 1, "layer", 32, 1e-5), "a vector of a norm"),
    ("glu", (0, 0, 0, "tanh"), "unknown activation"),
    ("activate", (0, 0, "clamped_swiglu"), "gates alone"),
    ("activate", (0, 1, "silu"), "one width"),
    ("linear_activate", (0, 2, 0, -1, "clamped_swiglu"), "gates alone"),
    ("linear_activate", (2, 2, 0, -1, "relu"), "cannot overwrite"),
    ("linear_activate", (1, 2, 0, -1, "relu"), "as many columns"),
    ("soft_cap", (0, 0, 0.0), "a cap"),
    ("soft_cap", (0, 0, float("nan")), "a cap"),
    ("gate_rows", (0, 0, 1), "one gate"),
    ("embed_position", (1, 0), "as wide as its buffer"),
    ("embed_position", (3, 0), "all rows"),
])  # fmt: skip
def test_invalid_ops_of_families_are_refused(
    call: str, arguments: tuple[Any, ...], message: str
) -> None:
    plan = _native.Plan("", 1)
    for width, rows, packed in (
        (32, "step", False),
        (16, "step", False),
        (32, "step", True),
        (32, "logit", False),
    ):
        plan.add_buffer(width, rows, packed)
    plan.add_weight("F32", 32, 32, np.zeros(4096, np.uint8), None)
    for size in (32, 8):
        plan.add_vector(np.ones(size, np.float32))
    with pytest.raises(ValueError, match=message):
        getattr(plan, call)(*arguments)
