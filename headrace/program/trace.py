"""Running a model function once over symbolic values gives its program."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Literal

from headrace.errors import FormatError
from headrace.program.kv import KvGroup, KvLayout
from headrace.program.moe import Experts, GateRows, Route
from headrace.program.op import Kind, Op, RowKind, StepSize, Value, Weight
from headrace.program.ops import (
    Activate,
    Activation,
    Add,
    Attention,
    ConcatHeads,
    Embed,
    EmbedPosition,
    GatherRows,
    Glu,
    HeadLinear,
    Input,
    KvWrite,
    Linear,
    Norm,
    NormKind,
    Rope,
    RopeAngles,
    Scale,
    SoftCap,
)
from headrace.quant.formats import Format, StoredTensor
from headrace.record import frozen


@frozen
class Program:
    """A flat list of ops, each value written once and before it is read; the row count is bound at
    run time.
    """

    ops: tuple[Op, ...]
    logits: Value | None
    """None in a stage of a pipeline that is not the last."""
    hidden: Value | None = None
    """What the logits are computed from, where it is to be kept."""
    pooled: Value | None = None
    """The same of the pooled rows, of a program that has them."""
    shared_kv_groups: tuple[KvGroup, ...] | None = None
    """Of a program that is one of several ranks': the groups of the whole model, in their order,
    with what of them is this rank's.
    """

    def keeping_hidden(self) -> "Program":
        """The same program, which also gives back the rows before its head. Not of one that was
        fused: there they are packed.
        """
        head = self._head()
        assert not head.x.packed, "a fused program has no such rows: ask for them before"
        return replace(self, hidden=head.x)

    def pooling(self) -> "Program":
        """The same program, which also gives back the pooled rows, behind the last norm; its head
        runs on the logit rows alone.
        """
        rows = self._head().x
        last = next(op for op in self.ops if op.output() == rows)
        assert isinstance(last, Norm) and last.x.rows == "gathered", (
            "rows are pooled behind the last norm of a model"
        )
        pooled = replace(
            last.out, id=1 + max(out.id for op in self.ops if (out := op.output())), rows="pooled"
        )
        return replace(self, ops=(*self.ops, replace(last, out=pooled)), pooled=pooled)

    def with_window(self, window: int, num_sink_tokens: int) -> "Program":
        """The same program with such a window, beside these sinks, in all layers that see
        everything; 0: as it is.
        """

        def limited(op: Op) -> Op:
            if not isinstance(op, Attention) or op.window:
                return op
            return replace(op, window=window, num_sink_tokens=num_sink_tokens)

        return replace(self, ops=tuple(map(limited, self.ops))) if window else self

    def _head(self) -> Linear:
        """The product that makes logits of rows."""
        assert self.logits, "a stage without logits has no head"
        writer = {out.id: op for op in self.ops if (out := op.output())}
        head = writer[self.logits.id]
        while isinstance(head, Scale | SoftCap):
            head = writer[head.x.id]
        assert isinstance(head, Linear)
        return head

    @property
    def results(self) -> list[Value]:
        """What the program gives back."""
        return [value for value in (self.logits, self.hidden, self.pooled) if value]

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The KV that the program reads and writes: its layers by what they keep and see, in the
        order of their first layers.
        """
        if self.shared_kv_groups is not None:
            return self.shared_kv_groups
        attention = [op for op in self.ops if isinstance(op, Attention)]
        layouts = {
            op.layer: KvLayout(op.num_kv_heads, op.head_dim, 0 if op.is_latent else op.value_dim)
            for op in attention
        }
        kinds = {op.layer: (layouts[op.layer], op.window, op.num_sink_tokens) for op in attention}
        alike = {
            kind: tuple(layer for layer in kinds if kinds[layer] == kind) for kind in kinds.values()
        }
        return tuple(KvGroup(layers, *kind) for kind, layers in alike.items())

    @property
    def attention_crossover(self) -> float:
        """Context with which attention takes a row of a prompt about as long as all the rest,
        before any window ends.

        Attention computes in bf16, the rest mostly in int8, of which a processor does twice as many
        operations in the same time.
        """
        row = StepSize(((0, 1),), 0, 0)
        attention = sum(op.flops(row) for op in self.ops if isinstance(op, Attention))
        rest = sum(op.flops(row) for op in self.ops) - attention
        return rest / (2 * attention)

    @property
    def weights(self) -> dict[str, Weight]:
        """All weights by name."""
        return {weight.name: weight for op in self.ops for weight in op.weights()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return sum(weight.nbytes for weight in self.weights.values())

    def with_weights(self, new: Mapping[str, Weight]) -> "Program":
        """The same program with each weight replaced by the new one of that name."""
        return replace(self, ops=tuple(op.with_weights(new) for op in self.ops))

    def last_use(self) -> dict[int, int]:
        """Index of the last op that reads each value (by id); what the program gives back outlives
        all ops.
        """
        last = {value.id: i for i, op in enumerate(self.ops) for value in op.inputs()}
        return last | {value.id: len(self.ops) for value in self.results}


class Tracer:
    """The op vocabulary as functions. Each call appends an op and returns its symbolic result."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.ops: list[Op] = []
        self._tensors = tensors
        self._ids = count()

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        """The named tensor, held against the shape that the equations need. Raises FormatError."""
        if name not in self._tensors:
            raise FormatError(f"the checkpoint has no tensor {name!r}")
        tensor = self._tensors[name]
        if (tensor.rows, tensor.cols) != (rows, cols):
            raise FormatError(
                f"tensor {name!r} has shape {tensor.shape}, and the model needs {(rows, cols)}"
            )
        return Weight(name, rows, cols, tensor.nbytes, _kind(tensor.format))

    def vector(self, name: str, size: int) -> Weight:
        """The named vector, as a weight of one row. Raises FormatError."""
        return self.weight(name, 1, size)

    def _value(self, width: int, rows: RowKind) -> Value:
        return Value(next(self._ids), width, rows)

    def embed(self, weight: Weight) -> Value:
        out = self._value(weight.cols, "step")
        self.ops.append(Embed(out, weight))
        return out

    def embed_position(self, weight: Weight) -> Value:
        out = self._value(weight.cols, "step")
        self.ops.append(EmbedPosition(out, weight))
        return out

    def input(self, width: int) -> Value:
        out = self._value(width, "step")
        self.ops.append(Input(out))
        return out

    def rope_angles(self, inverse_frequencies: tuple[float, ...], scale: float) -> Value:
        out = self._value(2 * len(inverse_frequencies), "step")
        self.ops.append(RopeAngles(out, inverse_frequencies, scale))
        return out

    def norm(
        self,
        x: Value,
        weight: Weight,
        eps: float,
        kind: NormKind = "rms",
        *,
        bias: Weight | None = None,
        size: int | None = None,
        rows: RowKind | None = None,
    ) -> Value:
        """`size`: columns that are taken together; all where it is not given. `rows`: which of
        gathered rows; all of them.
        """
        out = self._value(x.width, rows or x.rows)
        self.ops.append(Norm(out, x, weight, eps, kind, size or x.width, bias))
        return out

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        out = self._value(weight.rows, x.rows)
        self.ops.append(Linear(out, x, weight, bias))
        return out

    def head_linear(self, x: Value, heads: tuple[Weight, ...]) -> Value:
        """One matrix for each head, all of one shape; `x` has those heads, or one that they
        share.
        """
        out = self._value(sum(weight.rows for weight in heads), x.rows)
        self.ops.append(HeadLinear(out, x, heads))
        return out

    def concat_heads(self, x: Value, y: Value, num_heads: int, x_dim: int, y_dim: int) -> Value:
        """`x` and `y` have so many heads of these sizes, or one that all share."""
        out = self._value(num_heads * (x_dim + y_dim), x.rows)
        self.ops.append(ConcatHeads(out, x, y, num_heads, x_dim, y_dim))
        return out

    def rope(self, x: Value, angles: Value, head_dim: int) -> Value:
        out = self._value(x.width, x.rows)
        self.ops.append(Rope(out, x, angles, head_dim))
        return out

    def kv_write(self, k: Value, v: Value | None, layer: int) -> None:
        self.ops.append(KvWrite(k, v, layer))

    def attention(
        self,
        q: Value,
        layer: int,
        num_kv_heads: int,
        head_dim: int,
        window: int = 0,
        *,
        scale: float | None = None,
        value_dim: int | None = None,
        softcap: float = 0.0,
        slopes: tuple[float, ...] = (),
        sinks: Weight | None = None,
        is_latent: bool = False,
        num_sink_tokens: int = 0,
    ) -> Value:
        """`scale`: 1 / sqrt(head_dim) where it is not given; `value_dim`: head_dim."""
        num_heads, value_dim = q.width // head_dim, value_dim or head_dim
        scale = head_dim**-0.5 if scale is None else scale
        out = self._value(num_heads * value_dim, q.rows)
        shape = (num_heads, num_kv_heads, head_dim, value_dim)
        self.ops.append(
            Attention(
                out,
                q,
                layer,
                *shape,
                scale,
                window,
                softcap,
                slopes,
                sinks,
                is_latent,
                num_sink_tokens,
            )
        )
        return out

    def glu(self, gate: Value, up: Value, activation: Activation = "silu") -> Value:
        out = self._value(gate.width, gate.rows)
        self.ops.append(Glu(out, gate, up, activation))
        return out

    def activate(self, x: Value, activation: Activation) -> Value:
        out = self._value(x.width, x.rows)
        self.ops.append(Activate(out, x, activation))
        return out

    def route(
        self,
        x: Value,
        top_k: int,
        scoring: Literal["softmax", "sigmoid"],
        *,
        normalised: bool,
        factor: float = 1.0,
        groups: tuple[int, int] = (1, 1),
        bias: Weight | None = None,
    ) -> Value:
        """`x`: a logit for each expert; `groups`: how many there are, and in how many a row may go
        to experts.
        """
        out = self._value(2 * top_k, x.rows)
        self.ops.append(Route(out, x, top_k, scoring, normalised, factor, *groups, bias))
        return out

    def experts(
        self,
        x: Value,
        routing: Value,
        gate: tuple[Weight, ...],
        up: tuple[Weight, ...],
        down: tuple[Weight, ...],
        activation: Activation = "silu",
        biases: tuple[tuple[Weight, ...], ...] = ((), (), ()),
    ) -> Value:
        """One weight for each expert; `biases`: those of gate, up and down."""
        out = self._value(x.width, x.rows)
        self.ops.append(Experts(out, x, routing, gate, up, down, activation, *biases))
        return out

    def gate_rows(self, x: Value, gate: Value) -> Value:
        out = self._value(x.width, x.rows)
        self.ops.append(GateRows(out, x, gate))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        out = self._value(x.width, x.rows)
        self.ops.append(Scale(out, x, factor))
        return out

    def soft_cap(self, x: Value, cap: float) -> Value:
        out = self._value(x.width, x.rows)
        self.ops.append(SoftCap(out, x, cap))
        return out

    def add(self, x: Value, y: Value) -> Value:
        out = self._value(x.width, x.rows)
        self.ops.append(Add(out, x, y))
        return out

    def gather_rows(self, x: Value) -> Value:
        out = self._value(x.width, "gathered")
        self.ops.append(GatherRows(out, x))
        return out


def _kind(stored: Format) -> Kind:
    if stored.needs_floats:
        return "f32"
    return "int8" if stored.quantised else "bf16" if stored.name == "BF16" else "f32"


def trace(forward: Callable[[Tracer], Value], tensors: Mapping[str, StoredTensor]) -> Program:
    """The program of `forward`, which returns the logits. Raises FormatError for a missing or
    misshapen tensor.
    """
    tracer = Tracer(tensors)
    logits = forward(tracer)
    return Program(tuple(tracer.ops), logits)
