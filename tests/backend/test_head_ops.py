"""HeadLinear and ConcatHeads on the cpu backend equal the reference."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.program.op import Value
from headrace.program.trace import Tracer, trace
from headrace.quant.formats import FORMATS
from tests.backend.stored import random_stored
from tests.backend.test_family_ops import NOT_FINITE, Floats, Tensors, alone, run

ISAS = _native.isas()
TOLERANCE = {"F32": 1e-5, "F16": 1e-5, "BF16": 0.01}
"""Tolerance relative to the norm of the result; 0.05 for formats with int8 activations."""


def head_tensors(format: str, num_heads: int, rows: int, cols: int) -> Tensors:
    return {
        f"w.{head}": random_stored(format, rows, cols, head, f"w.{head}", cols**-0.5)
        for head in range(num_heads)
    }


def head_linear(tensors: Tensors, g: Tracer, x: Value) -> Value:
    return g.head_linear(
        x, tuple(g.weight(name, tensor.rows, tensor.cols) for name, tensor in tensors.items())
    )


def random_rows(num_rows: int, width: int) -> Floats:
    return np.random.default_rng(num_rows).standard_normal((num_rows, width)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "MXFP4", "I8_ROW"])
@settings(max_examples=4, deadline=None)
@given(
    num_heads=st.sampled_from([1, 2, 5]),
    rows=st.sampled_from([16, 24, 40]),
    cols=st.sampled_from([32, 64, 96]),
    num_rows=st.sampled_from([1, 3, 17, 150]),
    is_shared=st.booleans(),
)
def test_head_linear_equals_reference(
    isa: str, format: str, num_heads: int, rows: int, cols: int, num_rows: int, is_shared: bool
) -> None:
    """The bits of a row do not depend on other rows or on threads."""
    cols = 256 if FORMATS[format].block == 256 else cols
    tensors, x = (
        head_tensors(format, num_heads, rows, cols),
        random_rows(num_rows, cols if is_shared else num_heads * cols),
    )
    program = trace(lambda g: head_linear(tensors, g, g.input(x.shape[1])), tensors)
    want, got, _ = run(program, tensors, x, isa)
    assert np.linalg.norm(got - want) <= TOLERANCE.get(format, 0.05) * np.linalg.norm(want)
    assert np.array_equal(got, run(program, tensors, x, isa, threads=3)[1])
    assert np.array_equal(got[num_rows // 2 :], run(program, tensors, x[num_rows // 2 :], isa)[1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["F32", "BF16", "Q8_0", "I8_ROW"])
def test_head_linear_keeps_not_finite_numbers_in_their_head(isa: str, format: str) -> None:
    tensors, x = head_tensors(format, 3, 20, 32), random_rows(7, 96)
    good = alone(lambda g, y: head_linear(tensors, g, y), x, isa, tensors)[1]
    for i, bad in enumerate(NOT_FINITE):
        x[3, 32 + i] = bad
        spoilt = alone(lambda g, y: head_linear(tensors, g, y), x, isa, tensors)[1]
        assert not np.isfinite(spoilt[3, 20:40]).any()
        spoilt[3, 20:40] = good[3, 20:40]
        assert np.array_equal(spoilt, good)
        x[3, 32 + i] = 1.0
        good[3, 20:40] = alone(lambda g, y: head_linear(tensors, g, y), x, isa, tensors)[1][
            3, 20:40
        ]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("x_heads", "y_heads"), [(4, 4), (4, 1), (1, 4), (1, 1)])
def test_concat_heads_equals_reference(isa: str, x_heads: int, y_heads: int) -> None:
    """Bit-equal for any numbers, also into packed rows."""
    tensors = {
        name: random_stored("F32", rows, 24, rows, name, 1.0)
        for name, rows in (("x", 6 * x_heads), ("y", 3 * y_heads))
    }
    tensors["w"] = random_stored("F32", 5, 36, 0, "w", 1.0)
    rows = random_rows(19, 24)
    rows[7] = np.resize(NOT_FINITE, 24)

    def parts(g: Tracer, x: Value) -> tuple[Value, Value]:
        return g.linear(x, g.weight("x", 6 * x_heads, 24)), g.linear(
            x, g.weight("y", 3 * y_heads, 24)
        )

    first, second = (
        alone(lambda g, x, i=i: parts(g, x)[i], rows, isa, tensors)[1].reshape(19, -1, n)
        for i, n in ((0, 6), (1, 3))
    )
    each = [np.broadcast_to(part, (19, 4, part.shape[2])) for part in (first, second)]
    got = alone(lambda g, x: g.concat_heads(*parts(g, x), 4, 6, 3), rows, isa, tensors)[1]
    assert np.array_equal(got, np.concatenate(each, axis=2).reshape(19, 36), equal_nan=True)
    want, packed = alone(
        lambda g, x: g.linear(g.concat_heads(*parts(g, x), 4, 6, 3), g.weight("w", 5, 36)),
        np.delete(rows, 7, 0),
        isa,
        tensors,
    )
    np.testing.assert_allclose(packed, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("call", "arguments", "message"), [
    ("head_linear", (2, 0, []), "a weight for each"),
    ("head_linear", (2, 0, [0, 1]), "of one shape"),
    ("head_linear", (2, 0, [0, 3]), "no such weight"),
    ("head_linear", (2, 3, [0, 0]), "as many heads"),
    ("head_linear", (1, 0, [0, 0]), "as many columns"),
    ("head_linear", (4, 0, [0, 0]), "not on a packed one"),
    ("head_linear", (0, 0, [2, 2]), "cannot overwrite"),
    ("head_linear", (5, 0, [0, 0]), "as many columns"),
    ("concat_heads", (0, 1, 1, 2, 16, 15), "as many heads"),
    ("concat_heads", (0, 1, 1, 2, 8, 16), "as long as"),
    ("concat_heads", (0, 1, 1, 0, 16, 16), "as many heads"),
    ("concat_heads", (5, 1, 1, 2, 16, 16), "all rows"),
    ("concat_heads", (0, 1, 9, 2, 16, 16), "no such buffer"),
])  # fmt: skip
def test_invalid_head_ops_are_refused(call: str, arguments: tuple[Any, ...], message: str) -> None:
    plan = _native.Plan("", 1)
    for width, rows, packed in (
        *((64, "step", False), (16, "step", False), (48, "step", False), (33, "step", False)),
        *((48, "step", True), (64, "logit", False)),
    ):
        plan.add_buffer(width, rows, packed)
    for height, cols in ((24, 32), (24, 64), (32, 32)):
        plan.add_weight("F32", height, cols, np.zeros(height * cols * 4, np.uint8), None)
    with pytest.raises(ValueError, match=message):
        getattr(plan, call)(*arguments)
