"""The op vocabulary: what each op reads, writes and costs.

Every op is one line of equations over row matrices of float32, and says what it costs in a step of a given load. The planner, the
profiler and the benchmarks read these figures; there is no other copy of the arithmetic. tests/program/test_costs.py holds each to
what the reference backend is seen to do. They are least costs, of which limits are made:

* `flops` of an op with products (with weights, keys or values) counts two for each multiply-add. What such an op does besides, number
  by number (a bias, a residual, a rotation, silu, softmax), hides behind the products and does not count.
* `flops` of any other op counts one for each sum, product, quotient, root, exponential, sine and cosine of a number of its rows. What
  it computes once for a whole row, like the mean square of a norm, counts only for the numbers that go into it.
* `bytes` counts what an op must read from memory or write to it: each weight once, however many rows read it; the rows of an embedding
  for as many different tokens as there may be; the keys and values that it writes; those that the rows of a sequence see, once for
  all of these rows and all heads that share a KV head. Activations and tables do not count: they live in the caches.

All rows of a sequence count as one chain. Rows of a draft tree see less, so that their attention costs at most what is said here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

Kind = Literal["int8", "bf16", "f32"]
"""Number formats of multiply-adds: VNNI and its like, BF16 dot products, float32 FMA."""


class Load(NamedTuple):
    """What the cost of a step depends on besides the program."""

    seqs: tuple[tuple[int, int], ...]  # (tokens with KV before the step, rows) of each sequence
    logit_rows: int
    kv_bytes: float  # bytes of one stored key or value number

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.seqs)


@dataclass(frozen=True)
class Value:
    """A matrix of rows; `rows` says which rows of the step it has. A packed value is read by linear ops alone, so a
    backend may keep it in the form that its kernels read (quantised, say) and never as float32.
    """

    id: int
    width: int
    rows: Literal["step", "logit"]
    packed: bool = False

    def num_rows(self, load: Load) -> int:
        return load.rows if self.rows == "step" else load.logit_rows


@dataclass(frozen=True)
class Weight:
    """A reference to a stored tensor [rows, cols], or [cols] with rows = 1."""

    name: str
    rows: int
    cols: int
    nbytes: int
    """Bytes as stored; in a program that a backend has lowered, bytes in that backend's memory."""
    kind: Kind = "f32"
    """Number format of the multiply-adds with this weight."""


@dataclass(frozen=True)
class Op:
    """Base of all ops. By convention the output field is called `out`."""

    @property
    def name(self) -> str:
        """What profiles call it: `qkv_rope_write`."""
        return re.sub(r"\B[A-Z]", r"_\g<0>", type(self).__name__).lower()

    def inputs(self) -> list[Value]:
        return [v for name, v in vars(self).items() if name != "out" and isinstance(v, Value)]

    def output(self) -> Value | None:
        return vars(self).get("out")

    def weights(self) -> list[Weight]:
        return [*self.matrices(), *self.vectors()]

    def matrices(self) -> list[Weight]:
        """The weights that rows are multiplied with or taken from."""
        return [w for name, value in vars(self).items() if not _is_bias(name) for w in _weights_in(value)]

    def vectors(self) -> list[Weight]:
        """The weights that are added to or multiplied with whole rows, number by number."""
        return [w for name, value in vars(self).items() if _is_bias(name) for w in _weights_in(value)]

    def with_weights(self, new: Mapping[str, Weight]) -> Self:
        """The same op with each of its weights replaced by the new one of that name."""
        return replace(self, **{name: _replaced(value, new) for name, value in vars(self).items()})

    def flops(self, load: Load) -> int:
        return 0

    def bytes(self, load: Load) -> int:
        return sum(w.nbytes for w in self.weights())


def _is_bias(field: str) -> bool:
    return field.endswith("bias")


def _weights_in(value: object) -> Iterator[Weight]:
    """The weights that a field of an op holds: none, one, or those of a tuple."""
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _weights_in(part)


def _replaced(value: Any, new: Mapping[str, Weight]) -> Any:
    if isinstance(value, Weight):
        return new[value.name]
    return tuple(_replaced(part, new) for part in value) if isinstance(value, tuple) else value


def _matmul_flops(rows: int, *weights: Weight) -> int:
    return 2 * rows * sum(w.rows * w.cols for w in weights)


@dataclass(frozen=True)
class Embed(Op):
    """out[t] = weight[token[t]]"""

    out: Value
    weight: Weight

    def bytes(self, load: Load) -> int:
        return min(load.rows, self.weight.rows) * self.weight.nbytes // self.weight.rows


@dataclass(frozen=True)
class Input(Op):
    """out[t] = the row that the caller gives"""

    out: Value


@dataclass(frozen=True)
class RopeAngles(Op):
    """out[t] = cos and sin of position[t] * inverse_frequencies, times `scale`: dim / 2 cosines, then dim / 2 sines."""

    out: Value
    inverse_frequencies: tuple[float, ...]
    scale: float

    def flops(self, load: Load) -> int:
        return 5 * load.rows * len(self.inverse_frequencies)


@dataclass(frozen=True)
class Norm(Op):
    """RMSNorm (Zhang and Sennrich 2019): out = x / sqrt(mean(x^2) + eps) * weight"""

    out: Value
    x: Value
    weight: Weight
    eps: float

    def matrices(self) -> list[Weight]:
        return []

    def vectors(self) -> list[Weight]:
        return [self.weight]

    def flops(self, load: Load) -> int:
        return 4 * self.x.num_rows(load) * self.x.width


@dataclass(frozen=True)
class Linear(Op):
    """out = x @ weight.T + bias"""

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None = None

    def flops(self, load: Load) -> int:
        return _matmul_flops(self.x.num_rows(load), self.weight)


@dataclass(frozen=True)
class LinearAdd(Op):
    """out = residual + x @ weight.T + bias"""

    out: Value
    x: Value
    residual: Value
    weight: Weight
    bias: Weight | None = None

    def flops(self, load: Load) -> int:
        return _matmul_flops(self.x.num_rows(load), self.weight)


@dataclass(frozen=True)
class Rope(Op):
    """Rotates the first pairs (2i, 2i + 1) of every head, as many as there are angles, by the row's angles (Su et al. 2021)."""

    out: Value
    x: Value
    angles: Value
    head_dim: int

    def flops(self, load: Load) -> int:
        pairs = self.x.width // self.head_dim * self.angles.width // 2
        return 6 * self.x.num_rows(load) * pairs


@dataclass(frozen=True)
class KvWrite(Op):
    """KV[layer][slot[t]] = k[t], v[t]"""

    k: Value
    v: Value
    layer: int

    def bytes(self, load: Load) -> int:
        return int(load.rows * 2 * self.k.width * load.kv_bytes)


@dataclass(frozen=True)
class QkvRopeWrite(Op):
    """out = rope(x @ q.T); KV[layer][slot] = rope(x @ k.T), x @ v.T"""

    out: Value
    x: Value
    angles: Value
    q: Weight
    k: Weight
    v: Weight
    q_bias: Weight | None
    k_bias: Weight | None
    v_bias: Weight | None
    layer: int
    head_dim: int

    def flops(self, load: Load) -> int:
        return _matmul_flops(load.rows, self.q, self.k, self.v)

    def bytes(self, load: Load) -> int:
        return super().bytes(load) + int(load.rows * 2 * self.k.rows * load.kv_bytes)


@dataclass(frozen=True)
class Attention(Op):
    """Softmax attention of every head over the row's visible slots; `num_heads / num_kv_heads` heads share a KV head.

    `window` > 0: a row sees itself and the window - 1 positions before it.
    """

    out: Value
    q: Value
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0

    def _visible(self, position: int) -> int:
        return min(position + 1, self.window) if self.window else position + 1

    def flops(self, load: Load) -> int:
        pairs = sum(self._visible(context + r) for context, rows in load.seqs for r in range(rows))
        return 4 * pairs * self.num_heads * self.head_dim

    def bytes(self, load: Load) -> int:
        """K and V of every visible slot, read once for all rows and heads of a sequence."""
        slots = sum(min(context + rows, self.window + rows - 1 if self.window else context + rows) for context, rows in load.seqs)
        return int(2 * slots * self.num_kv_heads * self.head_dim * load.kv_bytes)


@dataclass(frozen=True)
class Glu(Op):
    """out = silu(gate) * up (Shazeer 2020)"""

    out: Value
    gate: Value
    up: Value

    def flops(self, load: Load) -> int:
        return 4 * self.out.num_rows(load) * self.out.width


@dataclass(frozen=True)
class Silu(Op):
    """out = x / (1 + exp(-x))"""

    out: Value
    x: Value

    def flops(self, load: Load) -> int:
        return 3 * self.out.num_rows(load) * self.out.width


@dataclass(frozen=True)
class GluLinear(Op):
    """out = silu(x @ gate.T + gate_bias) * (x @ up.T + up_bias)"""

    out: Value
    x: Value
    gate: Weight
    up: Weight
    gate_bias: Weight | None = None
    up_bias: Weight | None = None

    def flops(self, load: Load) -> int:
        return _matmul_flops(self.x.num_rows(load), self.gate, self.up)


@dataclass(frozen=True)
class Add(Op):
    """out = x + y"""

    out: Value
    x: Value
    y: Value

    def flops(self, load: Load) -> int:
        return self.out.num_rows(load) * self.out.width


@dataclass(frozen=True)
class GatherRows(Op):
    """out = the rows of x whose logits are wanted"""

    out: Value
    x: Value
