"""The weights of ops and of programs."""

from dataclasses import replace

import pytest

from headrace.model import trace_model
from headrace.program.op import Op, Value, Weight
from headrace.program.ops import Embed, GluLinear, Linear, Norm, QkvRopeWrite
from headrace.program.trace import Program, trace
from headrace.record import frozen
from tests.backend.stored import random_stored
from tests.tiny import tiny_model


@frozen
class Many(Op):
    """An op with weights in tuples, one of them nested."""

    out: Value
    x: Value
    experts: tuple[Weight, ...]
    pairs: tuple[tuple[Weight, Weight], ...]
    router: Weight
    bias: tuple[Weight, ...] = ()
    names: tuple[str, ...] = ("a", "b")


X, OUT = Value(0, 4, "step"), Value(1, 4, "step")


@pytest.fixture
def many() -> Many:
    a, b, c, d, router, bias = (
        Weight(name, 4, 4, 64) for name in ("a", "b", "c", "d", "router", "bias")
    )
    return Many(OUT, X, (a, b), ((c, d),), router, (bias,))


class TestWeights:
    def test_weights_in_tuples_are_found(self, many: Many) -> None:
        assert [w.name for w in many.weights()] == ["a", "b", "c", "d", "router", "bias"]
        assert [w.name for w in many.vectors()] == ["bias"]

    def test_weights_in_tuples_are_replaced(self, many: Many) -> None:
        new = {w.name: Weight(w.name, 4, 4, i) for i, w in enumerate(many.weights())}
        replaced = many.with_weights(new)
        assert [w.nbytes for w in replaced.weights()] == [0, 1, 2, 3, 4, 5]
        assert (replaced.out, replaced.x, replaced.names) == (many.out, many.x, many.names)

    def test_vectors_are_norms_and_biases(self) -> None:
        w, b = Weight("w", 1, 4, 16), Weight("b", 1, 4, 16)
        assert (
            Norm(OUT, X, w, 0.0, "rms", 4).matrices(),
            Norm(OUT, X, w, 0.0, "layer", 4, b).vectors(),
        ) == ([], [w, b])
        assert (Linear(OUT, X, w, b).matrices(), Linear(OUT, X, w, b).vectors()) == ([w], [b])
        assert Linear(OUT, X, w).weights() == [w] and Embed(OUT, w).matrices() == [w]
        assert GluLinear(OUT, X, w, w, "silu", b, None).vectors() == [b]
        assert QkvRopeWrite(OUT, X, X, w, w, w, b, b, None, 0, 4).vectors() == [b, b]


class TestProgram:
    def test_a_weight_counts_once(self) -> None:
        embed = random_stored("F32", 8, 4, 0, "embed")
        tied = trace(
            lambda g: g.linear(g.embed(g.weight("embed", 8, 4)), g.weight("embed", 8, 4)),
            {"embed": embed},
        )
        assert list(tied.weights) == ["embed"] and tied.weight_bytes == embed.nbytes == 128

    def test_all_weights_count(self) -> None:
        spec, tensors = tiny_model(0, format="Q4_0", dim=64)
        program = trace_model(spec, tensors)
        assert program.weights.keys() == tensors.keys()
        assert program.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())

    def test_weights_are_replaced_everywhere(self) -> None:
        spec, tensors = tiny_model(0)
        program = trace_model(spec, tensors)
        halved = program.with_weights(
            {
                name: Weight(name, w.rows, w.cols, w.nbytes // 2)
                for name, w in program.weights.items()
            }
        )
        assert 2 * halved.weight_bytes == program.weight_bytes
        assert isinstance(halved, Program) and [type(op) for op in halved.ops] == [
            type(op) for op in program.ops
        ]

    def test_with_hidden(self) -> None:
        program = trace_model(*tiny_model(0))
        head = program.ops[-1]
        assert isinstance(head, Linear) and program.hidden is None
        assert program.with_hidden() == replace(program, hidden=head.x)

    def test_last_use(self) -> None:
        program = trace_model(*tiny_model(0)).with_hidden()
        last = {
            value.id: [i for i, op in enumerate(program.ops) if value in op.inputs()]
            for op in program.ops
            for value in op.inputs()
        }
        assert program.hidden
        results = {program.logits.id: len(program.ops), program.hidden.id: len(program.ops)}
        assert program.last_use() == {id: max(ops) for id, ops in last.items()} | results
