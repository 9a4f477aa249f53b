"""The ops of a program: their equations over row matrices, weights and costs.

Costs are lower bounds. `flops` counts two for each multiply-add of an op with products, else one
for each operation on a number. `bytes` counts each weight once, the KV that the op writes, and
once the KV that a sequence's rows see.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.program.op import Op, StepSize, Value, Weight
from headrace.quant import kv
from headrace.record import frozen

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]
"""`silu` is x / (1 + exp(-x)). `gelu` is x times the normal distribution function of x,
`gelu_tanh` its approximation (Hendrycks and Gimpel 2016). `clamped_swiglu` (gpt-oss 2025) is gate
/ (1 + exp(-1.702 gate)) * (up + 1), with the gate at most 7 and the up in -7..7.
"""
NormKind = Literal["rms", "layer"]
"""`rms` divides by the root mean square (Zhang and Sennrich 2019); `layer` subtracts the mean
first (Ba et al. 2016).
"""

_ACTIVATION_FLOPS: dict[Activation, int] = {
    "silu": 3,
    "gelu": 4,
    "gelu_tanh": 7,
    "relu": 1,
    "clamped_swiglu": 8,
}


def matmul_flops(rows: int, *weights: Weight) -> int:
    return 2 * rows * sum(weight.rows * weight.cols for weight in weights)


@frozen
class Embed(Op):
    """out[t] = weight[token[t]]"""

    out: Value
    weight: Weight

    def bytes(self, step: StepSize) -> int:
        return min(step.rows, self.weight.rows) * self.weight.nbytes // self.weight.rows


@frozen
class EmbedPosition(Op):
    """out[t] = weight[position[t]]: learned positions (GPT-2, 2019), at most the last"""

    out: Value
    weight: Weight

    def bytes(self, step: StepSize) -> int:
        last = self.weight.rows - 1
        positions = {min(context + row, last) for context, rows in step.seqs for row in range(rows)}
        return len(positions) * self.weight.nbytes // self.weight.rows


@frozen
class Input(Op):
    """out[t] = input[t], a row that the caller puts into the batch"""

    out: Value


@frozen
class RopeAngles(Op):
    """out[t] = scale * [cos(a), sin(a)], with the angles a = position[t] * inverse_frequencies"""

    out: Value
    inverse_frequencies: tuple[float, ...]
    scale: float

    def flops(self, step: StepSize) -> int:
        return 5 * step.rows * len(self.inverse_frequencies)


@frozen
class Norm(Op):
    """out = x / sqrt(mean(x^2) + eps) * weight + bias, for each `size` columns of a row.

    A LayerNorm has x - mean(x) in place of x. Weight and bias have `size` numbers, or a number
    for each column. Of gathered rows, out may have only one kind.
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
        flops_per_number = {"rms": 4, "layer": 6}[self.kind] + (self.bias is not None)
        return flops_per_number * self.out.num_rows(step) * self.x.width


MOST_OF_A_MATRIX = 0.8
"""Share of a matrix from which backends read all of it."""


def needed_share(density: float, rows: int) -> float:
    """Share of a matrix that `rows` rows need together, if each needs `density` of it at random.

    With a share X of zeros in a row, X^rows are zeros in all.
    """
    share = 1 - (1 - density) ** max(rows, 1)
    return 1.0 if share > MOST_OF_A_MATRIX else share


@frozen
class Linear(Op):
    """out = x @ weight.T + bias"""

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None = None
    density: float = 1.0
    """Expected share of numbers of x that are not 0. Below 1, columns of zeros may stay unread."""

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), self.weight)

    def bytes(self, step: StepSize) -> int:
        return int(super().bytes(step) * needed_share(self.density, self.x.num_rows(step)))

    def copies(self) -> list[Weight]:
        return [self.weight] if self.density < 1 else []


@frozen
class LinearAdd(Op):
    """out = residual + x @ weight.T + bias"""

    out: Value
    x: Value
    residual: Value
    weight: Weight
    bias: Weight | None = None
    density: float = 1.0
    """As of `Linear`."""

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), self.weight)

    def bytes(self, step: StepSize) -> int:
        return int(super().bytes(step) * needed_share(self.density, self.x.num_rows(step)))

    def copies(self) -> list[Weight]:
        return [self.weight] if self.density < 1 else []


@frozen
class Threshold(Op):
    """out = x where |x| > least, else 0 (TEAL, Liu et al. 2024)"""

    out: Value
    x: Value
    least: float

    def flops(self, step: StepSize) -> int:
        return self.out.num_rows(step) * self.out.width


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
    """out[t, head] = x[t, head] @ heads[head].T; x may have one head that all share.

    DeepSeek-V2 (2024) computes keys and values in this way, or queries in its absorbed form.
    """

    out: Value
    x: Value
    heads: tuple[Weight, ...]

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), *self.heads)


@frozen
class ConcatHeads(Op):
    """out[t, head] = [x[t, head], y[t, head]]; x and y may have one head that all share"""

    out: Value
    x: Value
    y: Value
    num_heads: int
    x_dim: int
    y_dim: int


@frozen
class Rope(Op):
    """out = x with each pair (2i, 2i + 1) of a head rotated by angle i (Su et al. 2021).

    Further numbers of a head are copied.
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
    """KV[layer][slot[t]] = k[t], v[t]; without v, values are a part of the keys"""

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
    """out[t, head] = softmax(scores) @ values, over the KV slots that row t sees.

    A score is q . k * scale; `num_heads / num_kv_heads` heads share a KV head. With a `key_bias`
    [num_kv_heads * head_dim], k is the stored key plus this bias, rotated at the key's position
    by `key_frequencies`, and times `key_factor`. Then, in this order:

    * `softcap`: softcap * tanh(score / softcap) (Gemma 2, 2024);
    * `slopes`: minus the head's slope for each position between key and row (ALiBi, Press et al.
      2022);
    * `sinks` [num_heads]: the score of an additional key without a value (gpt-oss, 2025).

    With a `window`, a row sees `window` positions and the first `num_sink_tokens` (StreamingLLM,
    Xiao et al. 2023). If `is_latent`, the values are the first `value_dim` numbers of the keys.

    With `top_blocks`, a row attends to some blocks of 32 positions: its first visible block, the
    last two, and the `top_blocks` best of those between for its KV head (Quest, Tang et al. 2024).
    The rating of a block for a query head is the highest score that a key within the block's
    minimum and maximum of each number can have, less the best rating of all these blocks. The
    rating for a KV head is the maximum over its query heads. Of equal blocks the first is better.
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
    key_bias: Weight | None = None
    key_frequencies: tuple[float, ...] = ()
    """Radians per position of each rotary pair (2i, 2i + 1); further numbers do not rotate."""
    key_factor: float = 1.0
    top_blocks: int = 0
    has_key_bounds: bool = False
    """Whether the KV keeps the bounds of the keys of each block."""

    def matrices(self) -> list[Weight]:
        return []

    def vectors(self) -> list[Weight]:
        return [vector for vector in (self.sinks, self.key_bias) if vector]

    def key_bias_pairs(self, bias: NDArray[np.float32]) -> list[tuple[int, float, float, float]]:
        """(number, frequency, two biases) of the pairs of a KV head's bias that are not zero."""
        pairs = []
        for number in range(0, self.head_dim, 2):
            rotates = number // 2 < len(self.key_frequencies)
            frequency = self.key_frequencies[number // 2] if rotates else 0.0
            factor = self.key_factor if rotates else 1.0
            x, y = (float(part) * factor for part in bias[number : number + 2])
            if x or y:
                pairs.append((number, frequency, x, y))
        return pairs

    def _pairs(self, context: int, rows: int) -> int:
        """Number of positions that `rows` rows see, each row for itself."""
        growing, limit = rows, self._max_visible()
        if limit:
            # A row sees all positions until they are the most that it may see.
            growing = min(rows, max(0, limit - context))
        steady = (rows - growing) * limit
        return growing * context + growing * (growing + 1) // 2 + steady

    def _slots(self, context: int, rows: int) -> int:
        """Number of positions that any of `rows` rows sees."""
        limit = self._max_visible()
        return min(context + rows, limit + rows - 1) if limit else context + rows

    def _max_visible(self) -> int:
        """The most positions that a row sees; 0: no limit. Of chosen blocks, the least."""
        limit = self.window + self.num_sink_tokens if self.window else 0
        if not self.top_blocks:
            return limit
        chosen = (self.top_blocks + 2) * kv.BLOCK_SIZE + 1
        return min(limit, chosen) if limit else chosen

    def _candidates(self, context: int) -> int:
        """Blocks that a row with so many positions, its own included, chooses from."""
        seen = min(context, self.window) if self.window else context
        blocks = (seen - 1) // kv.BLOCK_SIZE - 2
        return blocks if self.top_blocks and blocks > self.top_blocks else 0

    def flops(self, step: StepSize) -> int:
        pairs = sum(self._pairs(context, rows) for context, rows in step.seqs)
        candidates = 0
        if self.top_blocks:
            candidates = sum(
                self._candidates(context + row + 1)
                for context, rows in step.seqs
                for row in range(rows)
            )
        numbers = pairs * (self.head_dim + self.value_dim) + candidates * 2 * self.head_dim
        return 2 * numbers * self.num_heads

    def bytes(self, step: StepSize) -> int:
        slots = sum(self._slots(context, rows) for context, rows in step.seqs)
        numbers = self.head_dim + (0 if self.is_latent else self.value_dim)
        bounds = sum(self._candidates(context + rows) for context, rows in step.seqs)
        bound_bytes = bounds * self.num_kv_heads * kv.bound_bytes(self.head_dim)
        kv_bytes = int(slots * self.num_kv_heads * numbers * step.kv_bytes)
        return super().bytes(step) + kv_bytes + bound_bytes


@frozen
class Glu(Op):
    """out = activation(gate) * up (Shazeer 2020)"""

    out: Value
    gate: Value
    up: Value
    activation: Activation
    density: float = 1.0
    """Expected share of numbers of activation(gate) that are not 0. Only fused ops save by it."""

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
class ExitChoice(Op):
    """out[r] = early[r] if p1 - p2 >= min_margin else late[r] (CALM, Schuster et al. 2022)

    p1 and p2 are the two largest probabilities of softmax(early[r]). Without `late`, other rows
    are NaN: they need further layers.
    """

    out: Value
    early: Value
    late: Value | None
    min_margin: float

    def flops(self, step: StepSize) -> int:
        return 4 * self.out.num_rows(step) * self.out.width


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
    density: float = 1.0
    """As of `Glu`. Below 1, rows of `up` that meet a 0 may stay unread."""

    def flops(self, step: StepSize) -> int:
        return matmul_flops(self.x.num_rows(step), self.gate, self.up)

    def bytes(self, step: StepSize) -> int:
        unread = 1 - needed_share(self.density, self.x.num_rows(step))
        return super().bytes(step) - int(self.up.nbytes * unread)

    def copies(self) -> list[Weight]:
        return [self.gate, self.up] if self.density < 1 else []


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
    """out = [logit rows of x, pooled rows of x]"""

    out: Value
    x: Value
