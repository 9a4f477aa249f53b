"""The op vocabulary: what each op reads, writes and costs.

Every op is one line of equations over row matrices of float32, and says what it costs in a step of
a given size (those of experts are in `moe.py`). The planner, the profiler and the benchmarks
read these figures; there is no other copy of the arithmetic. tests/program/test_costs.py holds each
to what the reference backend is seen to do. They are least costs, of which limits are made:

* `flops` of an op with products (with weights, keys or values) counts two for each multiply-add.
  What such an op does besides, number by number (a bias, a residual, a rotation, silu, softmax),
  hides behind the products and does not count.
* `flops` of any other op counts one for each sum, product, quotient, root, exponential, sine and
  cosine of a number of its rows. What it computes once for a whole row, like the mean square of a
  norm, counts only for the numbers that go into it.
* `bytes` counts what an op must read from memory or write to it: each weight once, however many
  rows read it; the rows of an embedding for as many different tokens as there may be; the keys and
  values that it writes; those that the rows of a sequence see, once for all of these rows and all
  heads that share a KV head. Activations and tables do not count: they live in the caches.

All rows of a sequence count as one chain. Rows of a draft tree see less, so that their attention
costs at most what is said here.
"""

from typing import Literal

from headrace.program.op import Op, StepSize, Value, Weight
from headrace.record import frozen

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]
"""What makes a gate of a number. `silu` is x / (1 + exp(-x)); `gelu` that with the normal
distribution in place of the logistic one, and `gelu_tanh` an approximation of it (Hendrycks and
Gimpel 2016); `clamped_swiglu` belongs to gates alone (gpt-oss 2025): of a gate of at most 7 and an
up of -7 to 7, gate / (1 + exp(-1.702 gate)) * (up + 1).
"""
NormKind = Literal["rms", "layer"]
"""RMSNorm (Zhang and Sennrich 2019) divides by the root of the mean square; LayerNorm (Ba et al.
2016) takes the mean off first.
"""

_ACTIVATION_FLOPS: dict[Activation, int] = {
    "silu": 3,
    "gelu": 4,
    "gelu_tanh": 7,
    "relu": 1,
    "clamped_swiglu": 8,
}


def matmul_flops(rows: int, *weights: Weight) -> int:
    """Those of so many rows times each of the weights."""
    return 2 * rows * sum(w.rows * w.cols for w in weights)


@frozen
class Embed(Op):
    """out[t] = weight[token[t]]"""

    out: Value
    weight: Weight

    def bytes(self, step: StepSize) -> int:
        return min(step.rows, self.weight.rows) * self.weight.nbytes // self.weight.rows


@frozen
class EmbedPosition(Op):
    """out[t] = weight[position[t]]: learned positions (GPT-2, 2019). A position beyond the last is
    that.
    """

    out: Value
    weight: Weight

    def bytes(self, step: StepSize) -> int:
        last = self.weight.rows - 1
        positions = {min(context + row, last) for context, rows in step.seqs for row in range(rows)}
        return len(positions) * self.weight.nbytes // self.weight.rows


@frozen
class Input(Op):
    """out[t] = the row that the caller gives"""

    out: Value


@frozen
class RopeAngles(Op):
    """out[t] = cos and sin of position[t] * inverse_frequencies, times `scale`: dim / 2 cosines,
    then dim / 2 sines.
    """

    out: Value
    inverse_frequencies: tuple[float, ...]
    scale: float

    def flops(self, step: StepSize) -> int:
        return 5 * step.rows * len(self.inverse_frequencies)


@frozen
class Norm(Op):
    """out = x / sqrt(mean(x^2) + eps) * weight + bias, over `size` columns at a time; LayerNorm has
    x - mean(x) in place of x.

    A weight and a bias have one number for each of the `size` columns, which all groups of columns
    share, or for each of all. Of gathered rows it may take those that have logits, or those that
    are pooled.
    """

    out: Value
    x: Value
    weight: Weight
    eps: float
    kind: NormKind
    size: int
    bias: Weight | None = None

    def matrices(self) -> list[Weight]:
        return []

    def vectors(self) -> list[Weight]:
        return [self.weight, self.bias] if self.bias else [self.weight]

    def flops(self, step: StepSize) -> int:
        return (
            ({"rms": 4, "layer": 6}[self.kind] + (self.bias is not None))
            * self.out.num_rows(step)
            * self.x.width
        )


@frozen
class Linear(Op):
    """out = x @ weight.T + bias"""

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None = None

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), self.weight)


@frozen
class LinearAdd(Op):
    """out = residual + x @ weight.T + bias"""

    out: Value
    x: Value
    residual: Value
    weight: Weight
    bias: Weight | None = None

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), self.weight)


@frozen
class LinearActivate(Op):
    """out = activation(x @ weight.T + bias)"""

    out: Value
    x: Value
    weight: Weight
    activation: Activation
    bias: Weight | None = None

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), self.weight)


@frozen
class HeadLinear(Op):
    """out[t, head] = x[t, head] @ heads[head].T, each head with a matrix of its own; x may also be
    one head that all share.

    DeepSeek-V2 (2024) makes keys and values of a latent row so, or, of queries, what is multiplied
    with the latent row itself.
    """

    out: Value
    x: Value
    heads: tuple[Weight, ...]

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), *self.heads)


@frozen
class ConcatHeads(Op):
    """out[t, head] = the numbers of x[t, head], then those of y[t, head]; either may also be one
    head that all share.
    """

    out: Value
    x: Value
    y: Value
    num_heads: int
    x_dim: int
    y_dim: int


@frozen
class Rope(Op):
    """Rotates the first pairs (2i, 2i + 1) of every head, as many as there are angles, by the row's
    angles (Su et al. 2021).
    """

    out: Value
    x: Value
    angles: Value
    head_dim: int

    def flops(self, step: StepSize) -> int:
        pairs = self.x.width // self.head_dim * self.angles.width // 2
        return 6 * self.x.num_rows(step) * pairs


@frozen
class KvWrite(Op):
    """KV[layer][slot[t]] = k[t], v[t]; only k[t] where values are part of the keys"""

    k: Value
    v: Value | None
    layer: int

    def bytes(self, step: StepSize) -> int:
        return int(step.rows * (self.k.width + (self.v.width if self.v else 0)) * step.kv_bytes)


@frozen
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

    def flops(self, step: StepSize) -> int:
        return matmul_flops(step.rows, self.q, self.k, self.v)

    def bytes(self, step: StepSize) -> int:
        return super().bytes(step) + int(step.rows * 2 * self.k.rows * step.kv_bytes)


@frozen
class Attention(Op):
    """Softmax attention of every head over the row's visible slots; `num_heads / num_kv_heads`
    heads share a KV head.

    A score is q . k * scale, and then, where these are given: `softcap` * tanh(score / `softcap`)
    (Gemma 2, 2024); minus the head's `slope` for each position that the key lies back (ALiBi, Press
    et al. 2022). `sinks` [num_heads] are scores of a key without value (gpt-oss, 2025). `window` >
    0: a row sees itself and the window - 1 positions before it, and besides these the first
    `num_sink_tokens` positions of all (StreamingLLM, Xiao et al. 2023). Where values are part of
    the keys (`is_latent`), they are the first `value_dim` numbers.
    """

    out: Value
    q: Value
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    slopes: tuple[float, ...] = ()
    sinks: Weight | None = None
    is_latent: bool = False
    num_sink_tokens: int = 0

    def matrices(self) -> list[Weight]:
        return []

    def vectors(self) -> list[Weight]:
        return [self.sinks] if self.sinks else []

    def _visible(self, position: int, rows: int = 1) -> int:
        """Positions that a row sees, or that so many rows see between them, the last of them at
        `position`.
        """
        before = max(0, position + 2 - rows - self.window) if self.window else 0
        return position + 1 - before + min(before, self.num_sink_tokens)

    def flops(self, step: StepSize) -> int:
        pairs = sum(self._visible(context + r) for context, rows in step.seqs for r in range(rows))
        return 2 * pairs * self.num_heads * (self.head_dim + self.value_dim)

    def bytes(self, step: StepSize) -> int:
        """K and V of every visible slot, read once for all rows and heads of a sequence."""
        slots = sum(self._visible(context + rows - 1, rows) for context, rows in step.seqs)
        numbers = self.head_dim + (0 if self.is_latent else self.value_dim)
        return super().bytes(step) + int(slots * self.num_kv_heads * numbers * step.kv_bytes)


@frozen
class Glu(Op):
    """out = activation(gate) * up (Shazeer 2020)"""

    out: Value
    gate: Value
    up: Value
    activation: Activation

    def flops(self, step: StepSize) -> int:
        return (_ACTIVATION_FLOPS[self.activation] + 1) * self.out.num_rows(step) * self.out.width


@frozen
class Activate(Op):
    """out = activation(x)"""

    out: Value
    x: Value
    activation: Activation

    def flops(self, step: StepSize) -> int:
        return _ACTIVATION_FLOPS[self.activation] * self.out.num_rows(step) * self.out.width


@frozen
class Scale(Op):
    """out = factor * x"""

    out: Value
    x: Value
    factor: float

    def flops(self, step: StepSize) -> int:
        return self.out.num_rows(step) * self.out.width


@frozen
class SoftCap(Op):
    """out = cap * tanh(x / cap) (Gemma 2, 2024)"""

    out: Value
    x: Value
    cap: float

    def flops(self, step: StepSize) -> int:
        return 3 * self.out.num_rows(step) * self.out.width


@frozen
class GluLinear(Op):
    """out = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)"""

    out: Value
    x: Value
    gate: Weight
    up: Weight
    activation: Activation
    gate_bias: Weight | None = None
    up_bias: Weight | None = None

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), self.gate, self.up)


@frozen
class Add(Op):
    """out = x + y"""

    out: Value
    x: Value
    y: Value

    def flops(self, step: StepSize) -> int:
        return self.out.num_rows(step) * self.out.width


@frozen
class GatherRows(Op):
    """out = the rows of x whose logits are wanted, and behind them those that are pooled"""

    out: Value
    x: Value
