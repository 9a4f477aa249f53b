"""The parts that decoders are made of, over the ops, and how layers of them become a model.

A family puts the parts together to a block, which takes the rows of a layer to those of the next.
Parts read from the specification what their constants are, and call their tensors by our names,
such as `layers.3.q`.
"""

from collections.abc import Callable

from headrace.model import mla
from headrace.model.rope import inverse_frequencies
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.program.op import RowKind, Value, Weight
from headrace.program.trace import Tracer

Block = Callable[["Decoder", int, Value], Value]


def decoder(block: Block) -> Callable[[ModelSpec, Tracer], Value]:
    """The equations of a model with such a block in each layer: logits [logit rows, vocab] of one
    step.
    """

    def forward(spec: ModelSpec, g: Tracer) -> Value:
        parts = Decoder(spec, g)
        x = parts.embed()
        for layer in range(spec.num_layers):
            x = block(parts, layer, x)
        return parts.logits(x)

    return forward


def sequential(d: "Decoder", layer: int, x: Value) -> Value:
    """The pre-norm block: attention, then the MLP, each of what a norm makes of the rows (GPT-2
    2019, Llama 2023).
    """
    attended = d.attend(layer, d.norm(x, f"layers.{layer}.attn_norm"))
    attended, x = d.last_rows(layer, attended, x)
    x = d.add(x, d.output(layer, attended))
    return d.add(x, d.mlp(layer, d.norm(x, f"layers.{layer}.mlp_norm")))


def parallel(d: "Decoder", layer: int, x: Value) -> Value:
    """Attention and MLP of the same rows, behind one norm (GPT-J, 2021)."""
    normed = d.norm(x, f"layers.{layer}.attn_norm")
    attended, x, normed = d.last_rows(layer, d.attend(layer, normed), x, normed)
    return d.add(d.add(x, d.output(layer, attended)), d.mlp(layer, normed))


def parallel_two_norms(d: "Decoder", layer: int, x: Value) -> Value:
    """Attention and MLP of the same rows, behind a norm each (GPT-NeoX, 2022)."""
    attended, x = d.last_rows(layer, d.attend(layer, d.norm(x, f"layers.{layer}.attn_norm")), x)
    return d.add(
        d.add(x, d.output(layer, attended)), d.mlp(layer, d.norm(x, f"layers.{layer}.mlp_norm"))
    )


def post_norm(d: "Decoder", layer: int, x: Value) -> Value:
    """Norms behind attention and MLP, and none before them (OLMo 2, 2024)."""
    attended, x = d.last_rows(layer, d.attend(layer, x), x)
    x = d.add(x, d.norm(d.output(layer, attended), f"layers.{layer}.attn_post_norm"))
    return d.add(x, d.norm(d.mlp(layer, x), f"layers.{layer}.mlp_post_norm"))


def sandwich(d: "Decoder", layer: int, x: Value) -> Value:
    """Norms before and behind attention and MLP (Gemma 2, 2024)."""
    attended, x = d.last_rows(layer, d.attend(layer, d.norm(x, f"layers.{layer}.attn_norm")), x)
    x = d.add(x, d.norm(d.output(layer, attended), f"layers.{layer}.attn_post_norm"))
    return d.add(
        x,
        d.norm(
            d.mlp(layer, d.norm(x, f"layers.{layer}.mlp_norm")), f"layers.{layer}.mlp_post_norm"
        ),
    )


def by_spec(d: "Decoder", layer: int, x: Value) -> Value:
    """The block that the specification names."""
    blocks = {
        "sequential": sequential,
        "parallel": parallel,
        "parallel_two_norms": parallel_two_norms,
    }
    return blocks[d.spec.block](d, layer, x)


class Decoder:
    """The parts of a model that is being traced."""

    def __init__(self, spec: ModelSpec, g: Tracer) -> None:
        self.spec = spec
        self.g = g
        self._embedding: Weight | None = None
        self._angles: dict[RopeSpec, Value] = {}

    def embed(self) -> Value:
        """The rows that the first layer takes."""
        g, spec = self.g, self.spec
        self._embedding = g.weight("embed", spec.vocab_size, spec.dim)
        for rope in dict.fromkeys(
            rope for layer in range(spec.num_layers) if (rope := spec.rope_of(layer))
        ):
            frequencies, scale = inverse_frequencies(
                rope, spec.max_context, spec.context or spec.max_context
            )
            self._angles[rope] = g.rope_angles(tuple(frequencies.tolist()), scale)
        x = g.embed(self._embedding)
        if spec.embedding_scale != 1:
            x = g.scale(x, spec.embedding_scale)
        if spec.learned_positions:
            x = g.add(x, g.embed_position(g.weight("positions", spec.learned_positions, spec.dim)))
        return self.norm(x, "embed_norm") if spec.embedding_norm else x

    def logits(self, x: Value) -> Value:
        """The logits of the rows that the last layer gives."""
        g, spec = self.g, self.spec
        x = self.norm(x, "norm", "logit")
        assert self._embedding
        head = (
            self._embedding if spec.tied_embeddings else g.weight("head", spec.vocab_size, spec.dim)
        )
        logits = g.linear(
            x, head, g.vector("head_bias", spec.vocab_size) if spec.head_bias else None
        )
        if spec.logit_scale != 1:
            logits = g.scale(logits, spec.logit_scale)
        return g.soft_cap(logits, spec.logit_softcap) if spec.logit_softcap else logits

    def attend(self, layer: int, x: Value) -> Value:
        """Attention of the rows `x`, before its output matrix; writes their KV."""
        g, spec, name = self.g, self.spec, f"layers.{layer}"
        if spec.mla:
            return mla.attend(self, spec.mla, layer, x)
        q = self._head_norm(
            self.linear(x, f"{name}.q", spec.num_heads * spec.head_dim, spec.qkv_bias),
            f"{name}.q_norm",
        )
        k = self._head_norm(
            self.linear(x, f"{name}.k", spec.num_kv_heads * spec.head_dim, spec.qkv_bias),
            f"{name}.k_norm",
        )
        v = self.linear(x, f"{name}.v", spec.num_kv_heads * spec.head_dim, spec.qkv_bias)
        if rope := spec.rope_of(layer):
            q, k = (g.rope(rows, self.angles(rope), spec.head_dim) for rows in (q, k))
        g.kv_write(k, v, layer)
        return g.attention(
            q,
            layer,
            spec.num_kv_heads,
            spec.head_dim,
            spec.window(layer),
            scale=spec.attention_scale or None,
            softcap=spec.attention_softcap,
            slopes=alibi_slopes(spec.num_heads, spec.alibi_bias) if spec.alibi_bias else (),
            sinks=g.vector(f"{name}.sinks", spec.num_heads) if spec.sinks else None,
        )

    def angles(self, rope: RopeSpec) -> Value:
        """The angles of a rotary embedding of the model."""
        return self._angles[rope]

    def output(self, layer: int, attended: Value) -> Value:
        """What attention adds to the rows."""
        return self.linear(attended, f"layers.{layer}.o", self.spec.dim, self.spec.output_bias)

    def last_rows(self, layer: int, *values: Value) -> tuple[Value, ...]:
        """The values themselves; in the last layer, whose KV is written, only their rows that have
        logits or are pooled.
        """
        return (
            tuple(self.g.gather_rows(value) for value in values)
            if layer == self.spec.num_layers - 1
            else values
        )

    def mlp(self, layer: int, x: Value) -> Value:
        """What the MLP adds to the rows, or the experts in its place."""
        spec = self.spec
        if spec.experts and layer not in spec.experts.dense_layers:
            return self._experts(layer, x)
        return self._unit(x, f"layers.{layer}", "", spec.ffn_dim, spec.mlp_bias)

    def norm(self, x: Value, name: str, rows: RowKind | None = None) -> Value:
        """The rows behind the norm of this name, or of gathered ones this kind alone."""
        g, spec = self.g, self.spec
        bias = g.vector(f"{name}_bias", spec.dim) if spec.norm_bias else None
        return g.norm(x, g.vector(name, spec.dim), spec.norm_eps, spec.norm, bias=bias, rows=rows)

    def linear(self, x: Value, name: str, rows: int, bias: bool) -> Value:
        """The product with the matrix of this name, which has a bias or not."""
        has_bias = self.g.vector(f"{name}_bias", rows) if bias else None
        return self.g.linear(x, self.g.weight(name, rows, x.width), has_bias)

    def add(self, x: Value, y: Value) -> Value:
        """The rows with what a part of a block adds to them."""
        return self.g.add(
            x, self.g.scale(y, self.spec.residual_scale) if self.spec.residual_scale != 1 else y
        )

    def _head_norm(self, x: Value, name: str) -> Value:
        spec = self.spec
        if spec.qk_norm == "none":
            return x
        weight = self.g.vector(name, spec.head_dim if spec.qk_norm == "head" else x.width)
        return self.g.norm(
            x,
            weight,
            spec.norm_eps,
            spec.norm,
            size=x.width if spec.qk_norm == "row" else spec.head_dim,
        )

    def _unit(self, x: Value, name: str, kind: str, width: int, bias: bool) -> Value:
        """A unit of so many gated, or only activated, numbers; its tensors are `gate`, `up` and
        `down` behind its kind.
        """
        g, spec = self.g, self.spec
        gate = self.linear(x, f"{name}.{kind}gate", width, bias) if spec.gated_mlp else None
        up = self.linear(x, f"{name}.{kind}up", width, bias)
        hidden = g.glu(gate, up, spec.activation) if gate else g.activate(up, spec.activation)
        return self.linear(hidden, f"{name}.{kind}down", spec.dim, bias)

    def _experts(self, layer: int, x: Value) -> Value:
        g, spec, e, name = self.g, self.spec, self.spec.experts, f"layers.{layer}"
        assert e
        logits = self.linear(x, f"{name}.router", e.num_experts, e.router_bias)
        bias = g.vector(f"{name}.choice_bias", e.num_experts) if e.choice_bias else None
        groups = (e.groups, e.top_groups)
        routing = g.route(
            logits,
            e.top_k,
            e.scoring,
            normalised=e.normalised,
            factor=e.factor,
            groups=groups,
            bias=bias,
        )
        names = [f"{name}.experts.{i}" for i in range(e.num_experts)]
        shapes = {
            "gate": (e.ffn_dim, spec.dim),
            "up": (e.ffn_dim, spec.dim),
            "down": (spec.dim, e.ffn_dim),
        }
        gate, up, down = (
            tuple(g.weight(f"{each}.{part}", *shape) for each in names)
            for part, shape in shapes.items()
        )
        biases = tuple(
            tuple(g.vector(f"{each}.{part}_bias", shape[0]) for each in names if e.bias)
            for part, shape in shapes.items()
        )
        y = g.experts(x, routing, gate, up, down, spec.activation, biases)
        if not e.shared_ffn_dim:
            return y
        shared = self._unit(x, name, "shared_", e.shared_ffn_dim, spec.mlp_bias)
        if e.shared_gate:
            shared = g.gate_rows(shared, self.linear(x, f"{name}.shared_router", 1, False))
        return g.add(y, shared)


def alibi_slopes(num_heads: int, bias: float) -> tuple[float, ...]:
    """How much a key's score falls with each position that it lies back, for each head (Press et
    al. 2022).

    They are powers of one number, for a power of two of heads; further heads have those between,
    each second one.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-bias * (i + 1) / power) for i in range(power)]
    between = [2 ** (-bias * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return tuple((slopes + between)[:num_heads])
