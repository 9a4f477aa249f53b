"""Ops that are fused, and ops that must not be."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings

from headrace.backend import forward
from headrace.backend.reference import executable as reference
from headrace.config import KvConfig
from headrace.program.fuse import fuse
from headrace.program.op import Op, Value
from headrace.program.ops import (
    Activate,
    GluLinear,
    KvWrite,
    Linear,
    LinearActivate,
    LinearAdd,
    QkvRopeWrite,
    Rope,
)
from headrace.program.trace import Tracer, trace
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored
from tests.program.shapes import SHAPES, VOCAB, decoder, families, others

DIM, HEAD = 32, 16
TENSORS = {
    name: random_stored("F32", DIM, DIM, i, name) for i, name in enumerate(("q", "k", "v", "o"))
}
TENSORS["n"] = random_stored("F32", 1, DIM, 9, "n")


class Parts(NamedTuple):
    """The keys, values and queries of a layer."""

    q: Value
    k: Value
    v: Value
    extra: Value | None = None


def fused(layer: Callable[[Tracer, Value], Parts], layers: int = 1) -> list[type[Op]]:
    """The kinds of ops in the fused program of these layers."""

    def forward(g: Tracer) -> Value:
        x = g.input(DIM)
        for i in range(layers):
            parts = layer(g, x)
            g.kv_write(parts.k, parts.v, i)
            x = g.add(
                x, g.linear(g.attention(parts.q, i, DIM // HEAD, HEAD), g.weight("o", DIM, DIM))
            )
            x = g.add(x, parts.extra) if parts.extra else x
        return x

    return [type(op) for op in fuse(trace(forward, TENSORS)).ops]


def linear(g: Tracer, x: Value, name: str) -> Value:
    return g.linear(x, g.weight(name, DIM, DIM))


def plain(g: Tracer, x: Value) -> Parts:
    angles = g.rope_angles((1.0,), 1.0)
    q, k = (g.rope(linear(g, x, name), angles, HEAD) for name in ("q", "k"))
    return Parts(q, k, linear(g, x, "v"))


def keys_first(g: Tracer, x: Value) -> Parts:
    angles = g.rope_angles((1.0,), 1.0)
    k, q = (g.rope(linear(g, x, name), angles, HEAD) for name in ("k", "q"))
    return Parts(q, k, linear(g, x, "v"))


def test_fuse_qkv() -> None:
    for layer in (plain, keys_first):
        assert fused(layer, layers=2)[1:] == 2 * [*fused(layer)[1:]]
        assert [kind for kind in fused(layer) if kind in (QkvRopeWrite, Rope, KvWrite)] == [
            QkvRopeWrite
        ]
        assert LinearAdd in fused(layer)


def no_rope(g: Tracer, x: Value) -> Parts:
    return Parts(*(linear(g, x, name) for name in ("q", "k", "v")))


def norm_between(g: Tracer, x: Value) -> Parts:
    angles, weight = g.rope_angles((1.0,), 1.0), g.weight("n", 1, DIM)
    q, k = (g.rope(g.norm(linear(g, x, name), weight, 1e-5), angles, HEAD) for name in ("q", "k"))
    return Parts(q, k, linear(g, x, "v"))


def keys_without_rope(g: Tracer, x: Value) -> Parts:
    parts = plain(g, x)
    return parts._replace(k=linear(g, x, "k"))


def two_bases(g: Tracer, x: Value) -> Parts:
    q, k = (
        g.rope(linear(g, x, name), g.rope_angles((base,), 1.0), HEAD)
        for name, base in (("q", 1.0), ("k", 0.5))
    )
    return Parts(q, k, linear(g, x, "v"))


def other_heads(g: Tracer, x: Value) -> Parts:
    """Ropes with another head size than the attention."""
    angles = g.rope_angles((1.0,), 1.0)
    q, k = (g.rope(linear(g, x, name), angles, HEAD // 2) for name in ("q", "k"))
    return Parts(q, k, linear(g, x, "v"))


def values_from_elsewhere(g: Tracer, x: Value) -> Parts:
    return plain(g, x)._replace(v=linear(g, g.norm(x, g.weight("n", 1, DIM), 1e-5), "v"))


def values_read_twice(g: Tracer, x: Value) -> Parts:
    parts = plain(g, x)
    return parts._replace(extra=parts.v)


def queries_read_twice(g: Tracer, x: Value) -> Parts:
    parts = plain(g, x)
    return parts._replace(extra=parts.q)


def keys_read_twice(g: Tracer, x: Value) -> Parts:
    parts = plain(g, x)
    return parts._replace(extra=parts.k)


@pytest.mark.parametrize(
    "layer",
    [
        no_rope,
        norm_between,
        keys_without_rope,
        two_bases,
        other_heads,
        values_from_elsewhere,
        values_read_twice,
        queries_read_twice,
        keys_read_twice,
    ],
)
def test_ops_that_must_not_fuse(layer: Callable[[Tracer, Value], Parts]) -> None:
    kinds = fused(layer)
    assert KvWrite in kinds and QkvRopeWrite not in kinds


@settings(max_examples=10, deadline=None)
@given(shape=SHAPES)
def test_a_fused_program_computes_the_same_logits(shape: dict[str, Any]) -> None:
    sequence, rng = Sequence([1, 0, 2], 4), np.random.default_rng(0)
    batch = batch_of([sequence], [rng.integers(0, VOCAB, 9).tolist()], [([], [])], trees=False)
    inputs = (
        rng.standard_normal((9, shape["kv_heads"] * shape["groups"] * shape["head_dim"])).astype(
            np.float32
        )
        / 4
    )
    for program, tensors in (decoder(shape), others(shape), families(shape)):
        batch = batch._replace(
            kv=batch.kv[:1] * len(program.kv_groups), inputs=inputs, logit_rows=batch.logit_rows[2:]
        )
        kv, together = KvConfig((3,) * len(program.kv_groups), 4, "f32"), fuse(program)
        assert len(together.ops) < len(program.ops)
        want, got = (
            forward(reference.compile(p, tensors, kv, 1), batch).logits for p in (program, together)
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_an_unfused_layer_does_not_stop_fusing_the_next() -> None:
    program, _ = others({"kv_heads": 1, "groups": 1, "head_dim": 32, "format": "F32"})
    kinds = [type(op) for op in fuse(program).ops]
    assert kinds.index(KvWrite) < kinds.index(QkvRopeWrite)


@pytest.mark.parametrize("keeps_hidden", [False, True])
def test_values_of_linear_ops_are_packed(keeps_hidden: bool) -> None:
    """Results of the program are not packed."""
    for make in (decoder, others, families):
        program, _ = make(
            {
                "kv_heads": 1,
                "groups": 2,
                "head_dim": 32,
                "rotated": 32,
                "window": 0,
                "format": "F32",
            }
        )
        program = fuse(program.with_hidden() if keeps_hidden else program)
        linear = {Linear, LinearActivate, LinearAdd, QkvRopeWrite, GluLinear}
        values = [
            (value, name == "x" and type(op) in linear)
            for op in program.ops
            for name, value in vars(op).items()
            if name != "out"
        ]
        reads = [(value.id, as_x) for value, as_x in values if isinstance(value, Value)]
        results = {value.id for value in (program.logits, program.hidden) if value}
        packed = {id for id, _ in reads} - {id for id, as_x in reads if not as_x} - results
        assert packed and (program.hidden is not None) == keeps_hidden
        for op in program.ops:
            for value in (*op.inputs(), *([op.output()] if op.output() else [])):
                assert value.packed is (value.id in packed) and value.rows in (
                    "step",
                    "gathered",
                    "logit",
                    "pooled",
                )


def test_fuse_activation_into_linear() -> None:
    """Unless the linear op has another reader, or its result is added to the residual."""

    def kinds(reads_twice: bool) -> list[type[Op]]:
        def forward(g: Tracer) -> Value:
            x = g.input(DIM)
            hidden = linear(g, x, "q")
            y = linear(g, g.activate(hidden, "gelu"), "k")
            return g.add(y, hidden if reads_twice else x)

        return [type(op) for op in fuse(trace(forward, TENSORS)).ops][1:]

    assert kinds(False) == [LinearActivate, LinearAdd]
    assert kinds(True) == [Linear, Activate, LinearAdd]
