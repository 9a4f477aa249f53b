"""Programs, and the tracer that records one from a model function."""

from collections.abc import Callable, Mapping, Sequence
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
    ExitChoice,
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
    """A flat list of ops, which write each value once and before it is read."""

    ops: tuple[Op, ...]
    logits: Value | None
    """None before the last pipeline stage."""
    hidden: Value | None = None
    pooled: Value | None = None
    taps: Value | None = None
    """Rows of the residual stream before some layers, next to each other, for a drafter."""
    layer_inputs: tuple[Value, ...] = ()
    """The residual stream before each layer and after the last, as traced."""
    shared_kv_groups: tuple[KvGroup, ...] | None = None
    """KV groups of the whole model, in the program of a rank."""

    def with_hidden(self) -> "Program":
        """Add the rows before the head to the results, before fusing packs them."""
        head = self.head()
        assert not head.x.packed, "hidden rows of a fused program are packed; add them before"
        return replace(self, hidden=head.x)

    def with_taps(self, layers: Sequence[int], *, final: bool = False) -> "Program":
        """Add the rows before these layers to the results, next to each other [rows, sum of
        widths].

        With `final` the last of them are the rows before the head, after the last norm. A model
        that keeps its rows (`ModelSpec.keeps_rows`) has them for all tokens.
        """
        values = [self.layer_inputs[layer] for layer in layers]
        ops, new_id = list(self.ops), self._new_id()
        if final:
            last, x = self._last_norm(), self.layer_inputs[-1]
            assert x.rows == "step", "the model keeps the rows of its last layer"
            norm = replace(last, x=x, out=Value(new_id, last.out.width, "step"))
            ops.insert(_after((x,), ops), norm)
            values.append(norm.out)
            new_id += 1
        merged, *others = values
        for value in others:
            out = Value(new_id, merged.width + value.width, "step")
            op = ConcatHeads(
                out=out, x=merged, y=value, num_heads=1, x_dim=merged.width, y_dim=value.width
            )
            # At once, so that the memory of the layer's rows can be used again.
            ops.insert(_after((merged, value), ops), op)
            merged, new_id = out, new_id + 1
        return replace(self, ops=tuple(ops), taps=merged)

    def with_residual(self) -> "Program":
        """Add the rows before the last norm to the results."""
        return replace(self, hidden=self._last_norm().x)

    def with_pooled(self) -> "Program":
        last_norm = self._last_norm()
        pooled = replace(last_norm.out, id=self._new_id(), rows="pooled")
        return replace(self, ops=(*self.ops, replace(last_norm, out=pooled)), pooled=pooled)

    def _last_norm(self) -> Norm:
        rows = self.head().x
        last_norm = next(op for op in self.ops if op.output() == rows)
        assert isinstance(last_norm, Norm) and last_norm.x.rows == "gathered", (
            "a model has a norm before its head"
        )
        return last_norm

    def _new_id(self) -> int:
        return 1 + max(out.id for op in self.ops if (out := op.output()))

    def with_window(self, window: int, num_sink_tokens: int) -> "Program":
        """Set the window of all layers without one; 0 changes nothing."""
        if not window:
            return self

        def limited(op: Op) -> Op:
            if not isinstance(op, Attention) or op.window:
                return op
            return replace(op, window=window, num_sink_tokens=num_sink_tokens)

        return replace(self, ops=tuple(map(limited, self.ops)))

    def with_top_blocks(self, top_blocks: int) -> "Program":
        """Let all layers attend to this number of chosen blocks; 0 changes nothing."""
        if not top_blocks:
            return self
        return self._with_attention(
            lambda op: replace(op, top_blocks=top_blocks, has_key_bounds=True)
        )

    def with_key_bounds(self) -> "Program":
        """Keep the bounds of keys, for another program over the same KV."""
        return self._with_attention(lambda op: replace(op, has_key_bounds=True))

    def _with_attention(self, change: Callable[[Attention], Attention]) -> "Program":
        ops = (change(op) if isinstance(op, Attention) else op for op in self.ops)
        return replace(self, ops=tuple(ops))

    def head(self) -> Linear:
        assert self.logits, "a stage without logits has no head"
        writer = {out.id: op for op in self.ops if (out := op.output())}
        head = writer[self.logits.id]
        while isinstance(head, Scale | SoftCap | ExitChoice):
            read = (head.late or head.early) if isinstance(head, ExitChoice) else head.x
            head = writer[read.id]
        assert isinstance(head, Linear)
        return head

    @property
    def results(self) -> list[Value]:
        results = (self.logits, self.hidden, self.pooled, self.taps)
        return [value for value in results if value]

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        if self.shared_kv_groups is not None:
            return self.shared_kv_groups

        layers_of_kind: dict[tuple[KvLayout, int, int, bool], list[int]] = {}
        for op in self.ops:
            if isinstance(op, Attention):
                value_dim = 0 if op.is_latent else op.value_dim
                layout = KvLayout(op.num_kv_heads, op.head_dim, value_dim)
                kind = (layout, op.window, op.num_sink_tokens, op.has_key_bounds)
                layers_of_kind.setdefault(kind, []).append(op.layer)
        return tuple(
            KvGroup(
                layers=tuple(layers),
                layout=layout,
                window=window,
                num_sink_tokens=num_sink_tokens,
                has_key_bounds=has_key_bounds,
            )
            for (
                layout,
                window,
                num_sink_tokens,
                has_key_bounds,
            ), layers in layers_of_kind.items()
        )

    @property
    def attention_crossover(self) -> float:
        """Context length at which attention takes as long as all other ops of a prompt row.

        Windows are ignored. Attention computes in bf16, other ops mostly in int8, twice as fast.
        """
        row = StepSize(((0, 1),), 0, 0)
        attention = sum(op.flops(row) for op in self.ops if isinstance(op, Attention))
        others = sum(op.flops(row) for op in self.ops) - attention
        return others / (2 * attention)

    @property
    def weights(self) -> dict[str, Weight]:
        return {weight.name: weight for op in self.ops for weight in op.weights()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once, and of their copies."""
        return sum(weight.nbytes for weight in self.weights.values()) + self.copy_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copies of matrices that ops read in part."""
        copies = {weight.name: weight for op in self.ops for weight in op.copies()}
        return sum(weight.copy_nbytes or weight.nbytes for weight in copies.values())

    def with_weights(self, new: Mapping[str, Weight]) -> "Program":
        return replace(self, ops=tuple(op.with_weights(new) for op in self.ops))

    def last_use(self) -> dict[int, int]:
        """Index of each value's last reader, by id; for results, the number of ops."""
        last = {value.id: i for i, op in enumerate(self.ops) for value in op.inputs()}
        return last | {value.id: len(self.ops) for value in self.results}


def _after(values: Sequence[Value], ops: Sequence[Op]) -> int:
    """The index after the ops that write these values."""
    return 1 + max(i for i, op in enumerate(ops) if op.output() in values)


class Tracer:
    """Each method records an op and returns its output value."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.ops: list[Op] = []
        self.layer_inputs: list[Value] = []
        self._tensors = tensors
        self._ids = count()

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        """Raises FormatError if no tensor has this name and shape."""
        if name not in self._tensors:
            raise FormatError(f"tensor {name!r} is missing from the checkpoint")
        tensor = self._tensors[name]
        if (tensor.rows, tensor.cols) != (rows, cols):
            raise FormatError(
                f"tensor {name!r} has shape {tensor.shape}, but the model needs {(rows, cols)}"
            )
        return Weight(
            name=name, rows=rows, cols=cols, nbytes=tensor.nbytes, kind=_kind(tensor.format)
        )

    def vector(self, name: str, size: int) -> Weight:
        return self.weight(name, 1, size)

    def has(self, name: str) -> bool:
        return name in self._tensors

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
        """`size`: columns that are normalised together (default: all)."""
        out = self._value(x.width, rows or x.rows)
        self.ops.append(
            Norm(out=out, x=x, weight=weight, eps=eps, kind=kind, size=size or x.width, bias=bias)
        )
        return out

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        out = self._value(weight.rows, x.rows)
        self.ops.append(Linear(out=out, x=x, weight=weight, bias=bias))
        return out

    def head_linear(self, x: Value, heads: tuple[Weight, ...]) -> Value:
        out = self._value(sum(weight.rows for weight in heads), x.rows)
        self.ops.append(HeadLinear(out, x, heads))
        return out

    def concat_heads(self, x: Value, y: Value, num_heads: int, x_dim: int, y_dim: int) -> Value:
        out = self._value(num_heads * (x_dim + y_dim), x.rows)
        self.ops.append(
            ConcatHeads(out=out, x=x, y=y, num_heads=num_heads, x_dim=x_dim, y_dim=y_dim)
        )
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
        key_bias: Weight | None = None,
        key_frequencies: tuple[float, ...] = (),
        key_factor: float = 1.0,
    ) -> Value:
        """Defaults: `scale` is 1 / sqrt(head_dim), and `value_dim` is head_dim."""
        num_heads, value_dim = q.width // head_dim, value_dim or head_dim
        out = self._value(num_heads * value_dim, q.rows)
        self.ops.append(
            Attention(
                out=out,
                q=q,
                layer=layer,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                scale=head_dim**-0.5 if scale is None else scale,
                window=window,
                softcap=softcap,
                slopes=slopes,
                sinks=sinks,
                is_latent=is_latent,
                num_sink_tokens=num_sink_tokens,
                key_bias=key_bias,
                key_frequencies=key_frequencies,
                key_factor=key_factor,
            )
        )
        return out

    def glu(self, gate: Value, up: Value, activation: Activation = "silu") -> Value:
        out = self._value(gate.width, gate.rows)
        self.ops.append(Glu(out=out, gate=gate, up=up, activation=activation))
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
        """`groups`: (groups, top_groups)."""
        out = self._value(2 * top_k, x.rows)
        num_groups, top_groups = groups
        self.ops.append(
            Route(
                out=out,
                x=x,
                top_k=top_k,
                scoring=scoring,
                normalised=normalised,
                factor=factor,
                groups=num_groups,
                top_groups=top_groups,
                bias=bias,
            )
        )
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
        """`biases`: (gate_bias, up_bias, down_bias)."""
        out = self._value(x.width, x.rows)
        gate_bias, up_bias, down_bias = biases
        self.ops.append(
            Experts(
                out=out,
                x=x,
                routing=routing,
                gate=gate,
                up=up,
                down=down,
                activation=activation,
                gate_bias=gate_bias,
                up_bias=up_bias,
                down_bias=down_bias,
            )
        )
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

    def exit_choice(self, early: Value, late: Value | None, min_margin: float) -> Value:
        out = self._value(early.width, early.rows)
        self.ops.append(ExitChoice(out, early, late, min_margin))
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
    if stored.quantised:
        return "int8"
    return "bf16" if stored.is_bf16 else "f32"


def trace(forward: Callable[[Tracer], Value], tensors: Mapping[str, StoredTensor]) -> Program:
    """The program of `forward`, which returns the logits. Raises FormatError for wrong shapes."""
    tracer = Tracer(tensors)
    logits = forward(tracer)
    return Program(tuple(tracer.ops), logits, layer_inputs=tuple(tracer.layer_inputs))
