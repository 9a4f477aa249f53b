"""Parts and blocks of decoders."""

from collections.abc import Callable

from headrace.model import mla
from headrace.model.rope import inverse_frequencies
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.program.op import RowKind, Value, Weight
from headrace.program.trace import Tracer

Block = Callable[["Decoder", int, Value], Value]


def decoder(block: Block) -> Callable[[ModelSpec, Tracer], Value]:
    def forward(spec: ModelSpec, g: Tracer) -> Value:
        d = Decoder(spec, g)
        x = d.embed()
        early = None
        for layer in spec.used_layers:
            g.layer_inputs.append(x)
            x = block(d, layer, x)
            if d.can_exit_after(layer):
                early = d.early_logits(g.gather_rows(x))
        g.layer_inputs.append(x)
        if spec.keeps_rows:
            x = g.gather_rows(x)
        return d.with_exit(early, x)

    return forward


def sequential(d: "Decoder", layer: int, x: Value) -> Value:
    """Attention, then the MLP, each with a norm before it (GPT-2 2019, Llama)."""
    attended = d.attend(layer, d.norm(x, f"layers.{layer}.attn_norm"))
    attended, x = d.last_rows(layer, attended, x)
    x = d.add(x, d.output(layer, attended))
    return d.add(x, d.mlp(layer, d.norm(x, f"layers.{layer}.mlp_norm")))


def parallel(d: "Decoder", layer: int, x: Value) -> Value:
    """Attention and MLP in parallel, after one norm (GPT-J, 2021)."""
    normed = d.norm(x, f"layers.{layer}.attn_norm")
    attended, x, normed = d.last_rows(layer, d.attend(layer, normed), x, normed)
    return d.add(d.add(x, d.output(layer, attended)), d.mlp(layer, normed))


def parallel_two_norms(d: "Decoder", layer: int, x: Value) -> Value:
    """Attention and MLP in parallel, each after its own norm (GPT-NeoX, 2022)."""
    attended = d.attend(layer, d.norm(x, f"layers.{layer}.attn_norm"))
    attended, x = d.last_rows(layer, attended, x)
    y = d.add(x, d.output(layer, attended))
    return d.add(y, d.mlp(layer, d.norm(x, f"layers.{layer}.mlp_norm")))


def post_norm(d: "Decoder", layer: int, x: Value) -> Value:
    """Attention and MLP with norms after them (OLMo 2, 2024)."""
    attended, x = d.last_rows(layer, d.attend(layer, x), x)
    x = d.add(x, d.norm(d.output(layer, attended), f"layers.{layer}.attn_post_norm"))
    return d.add(x, d.norm(d.mlp(layer, x), f"layers.{layer}.mlp_post_norm"))


def sandwich(d: "Decoder", layer: int, x: Value) -> Value:
    """Attention and MLP with norms before and after them (Gemma 2, 2024)."""
    attended = d.attend(layer, d.norm(x, f"layers.{layer}.attn_norm"))
    attended, x = d.last_rows(layer, attended, x)
    x = d.add(x, d.norm(d.output(layer, attended), f"layers.{layer}.attn_post_norm"))
    mlp = d.mlp(layer, d.norm(x, f"layers.{layer}.mlp_norm"))
    return d.add(x, d.norm(mlp, f"layers.{layer}.mlp_post_norm"))


def by_spec(d: "Decoder", layer: int, x: Value) -> Value:
    blocks = {
        "sequential": sequential,
        "parallel": parallel,
        "parallel_two_norms": parallel_two_norms,
    }
    return blocks[d.spec.block](d, layer, x)


class Decoder:
    """Each method traces a part and returns its result."""

    def __init__(self, spec: ModelSpec, g: Tracer) -> None:
        self.spec = spec
        self.g = g
        self._embedding: Weight | None = None
        self._angles: dict[RopeSpec, Value] = {}
        self._frequencies: dict[RopeSpec, tuple[tuple[float, ...], float]] = {}

    def embed(self) -> Value:
        g, spec = self.g, self.spec
        self._embedding = g.weight("embed", spec.vocab_size, spec.dim)
        for layer in spec.used_layers:
            rope = spec.rope_of(layer)
            if rope and rope not in self._angles:
                self._angles[rope] = self._rope_angles(rope)

        x = g.embed(self._embedding)
        if spec.embedding_scale != 1:
            x = g.scale(x, spec.embedding_scale)
        if spec.learned_positions:
            positions = g.weight("positions", spec.learned_positions, spec.dim)
            x = g.add(x, g.embed_position(positions))
        return self.norm(x, "embed_norm") if spec.embedding_norm else x

    def _rope_angles(self, rope: RopeSpec) -> Value:
        spec = self.spec
        frequencies, scale = inverse_frequencies(
            rope, spec.max_context, spec.context or spec.max_context
        )
        self._frequencies[rope] = tuple(frequencies.tolist()), scale
        return self.g.rope_angles(*self._frequencies[rope])

    def logits(self, x: Value) -> Value:
        return self._head(self.norm(x, "norm", "logit"))

    def early_logits(self, x: Value) -> Value:
        """Logits at the early exit, whose rows a linear map may change before the head."""
        g, spec, early_exit = self.g, self.spec, self.spec.early_exit
        assert early_exit
        x = self.norm(x, "norm", "logit")
        if g.has(early_exit.map_name):
            x = self.linear(x, early_exit.map_name, spec.dim, True)
        return self._head(x)

    def _head(self, x: Value) -> Value:
        g, spec = self.g, self.spec
        assert self._embedding
        head = self._embedding
        if not spec.tied_embeddings:
            head = g.weight("head", spec.vocab_size, spec.dim)
        bias = g.vector("head_bias", spec.vocab_size) if spec.head_bias else None

        logits = g.linear(x, head, bias)
        if spec.logit_scale != 1:
            logits = g.scale(logits, spec.logit_scale)
        return g.soft_cap(logits, spec.logit_softcap) if spec.logit_softcap else logits

    def can_exit_after(self, layer: int) -> bool:
        """Whether rows may leave after this layer, and others go on."""
        early_exit = self.spec.early_exit
        return bool(
            early_exit and layer == early_exit.num_layers - 1 and layer != self.spec.used_layers[-1]
        )

    def with_exit(self, early: Value | None, x: Value) -> Value:
        """The logits of the last rows `x`, or of the early exit.

        A program that ends at the exit has no logits (NaN) for rows that need further layers.
        """
        early_exit = self.spec.early_exit
        if not early_exit:
            return self.logits(x)
        if early:
            return self.g.exit_choice(early, self.logits(x), early_exit.min_margin)
        return self.g.exit_choice(self.early_logits(x), None, early_exit.min_margin)

    def attend(self, layer: int, x: Value) -> Value:
        """Attention before its output matrix. Writes KV."""
        g, spec, name = self.g, self.spec, f"layers.{layer}"
        if spec.mla:
            return mla.attend(self, spec.mla, layer, x)

        q_width = spec.num_heads * spec.head_dim
        kv_width = spec.num_kv_heads * spec.head_dim
        q = self.linear(x, f"{name}.q", q_width, spec.qkv_bias)
        q = self._head_norm(q, f"{name}.q_norm")
        k_bias, key_bias = self._key_biases(f"{name}.k_bias", kv_width)
        k = g.linear(x, g.weight(f"{name}.k", kv_width, x.width), k_bias)
        k = self._head_norm(k, f"{name}.k_norm")
        v = self.linear(x, f"{name}.v", kv_width, spec.qkv_bias)
        if rope := spec.rope_of(layer):
            q = g.rope(q, self.angles(rope), spec.head_dim)
            k = g.rope(k, self.angles(rope), spec.head_dim)

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
            key_bias=key_bias,
            key_frequencies=self._frequencies[rope][0] if rope and key_bias else (),
            key_factor=self._frequencies[rope][1] if rope and key_bias else 1.0,
        )

    def _key_biases(self, name: str, width: int) -> tuple[Weight | None, Weight | None]:
        """The biases of stored keys and of scores (`checkpoint/key_biases.py`)."""
        g = self.g
        if not self.spec.qkv_bias:
            return None, None
        if not g.has(f"{name}_large"):
            return g.vector(name, width), None
        return g.vector(f"{name}_small", width), g.vector(f"{name}_large", width)

    def angles(self, rope: RopeSpec) -> Value:
        return self._angles[rope]

    def output(self, layer: int, attended: Value) -> Value:
        return self.linear(attended, f"layers.{layer}.o", self.spec.dim, self.spec.output_bias)

    def last_rows(self, layer: int, *values: Value) -> tuple[Value, ...]:
        """In the last layer, keep only the logit rows and pooled rows; elsewhere keep all rows."""
        if layer != self.spec.used_layers[-1] or self.spec.keeps_rows:
            return values
        return tuple(self.g.gather_rows(value) for value in values)

    def mlp(self, layer: int, x: Value) -> Value:
        spec = self.spec
        if spec.experts and layer not in spec.experts.dense_layers:
            return self._experts(layer, x)
        return self._mlp(x, f"layers.{layer}.", spec.ffn_dim, spec.mlp_bias)

    def norm(self, x: Value, name: str, rows: RowKind | None = None) -> Value:
        g, spec = self.g, self.spec
        bias = g.vector(f"{name}_bias", spec.dim) if spec.norm_bias else None
        return g.norm(x, g.vector(name, spec.dim), spec.norm_eps, spec.norm, bias=bias, rows=rows)

    def linear(self, x: Value, name: str, rows: int, has_bias: bool) -> Value:
        bias = self.g.vector(f"{name}_bias", rows) if has_bias else None
        return self.g.linear(x, self.g.weight(name, rows, x.width), bias)

    def add(self, x: Value, y: Value) -> Value:
        scale = self.spec.residual_scale
        return self.g.add(x, self.g.scale(y, scale) if scale != 1 else y)

    def _head_norm(self, x: Value, name: str) -> Value:
        g, spec = self.g, self.spec
        if spec.qk_norm == "none":
            return x
        weight = g.vector(name, spec.head_dim if spec.qk_norm == "head" else x.width)
        size = x.width if spec.qk_norm == "row" else spec.head_dim
        return g.norm(x, weight, spec.norm_eps, spec.norm, size=size)

    def _mlp(self, x: Value, prefix: str, width: int, has_bias: bool) -> Value:
        g, spec = self.g, self.spec
        gate = self.linear(x, f"{prefix}gate", width, has_bias) if spec.gated_mlp else None
        up = self.linear(x, f"{prefix}up", width, has_bias)
        hidden = g.glu(gate, up, spec.activation) if gate else g.activate(up, spec.activation)
        if spec.squares_activation:  # the only activation whose square is a gated unit
            assert spec.activation == "relu" and not gate
            hidden = g.glu(hidden, hidden, "relu")
        return self.linear(hidden, f"{prefix}down", spec.dim, has_bias)

    def _experts(self, layer: int, x: Value) -> Value:
        g, spec, e, name = self.g, self.spec, self.spec.experts, f"layers.{layer}"
        assert e
        routing = g.route(
            self.linear(x, f"{name}.router", e.num_experts, e.router_bias),
            e.top_k,
            e.scoring,
            normalised=e.normalised,
            factor=e.factor,
            groups=(e.groups, e.top_groups),
            bias=g.vector(f"{name}.choice_bias", e.num_experts) if e.choice_bias else None,
        )

        experts = [f"{name}.experts.{i}" for i in range(e.num_experts)]
        shapes = {
            "gate": (e.ffn_dim, spec.dim),
            "up": (e.ffn_dim, spec.dim),
            "down": (spec.dim, e.ffn_dim),
        }
        gate, up, down = (
            tuple(g.weight(f"{expert}.{part}", *shape) for expert in experts)
            for part, shape in shapes.items()
        )
        biases = tuple(
            tuple(g.vector(f"{expert}.{part}_bias", rows) for expert in experts if e.bias)
            for part, (rows, _) in shapes.items()
        )
        y = g.experts(x, routing, gate, up, down, spec.activation, biases)
        if not e.shared_ffn_dim:
            return y

        shared = self._mlp(x, f"{name}.shared_", e.shared_ffn_dim, spec.mlp_bias)
        if e.shared_gate:
            shared = g.gate_rows(shared, self.linear(x, f"{name}.shared_router", 1, False))
        return g.add(y, shared)


def alibi_slopes(num_heads: int, bias: float) -> tuple[float, ...]:
    """The slope of each head (Press et al. 2022).

    Heads beyond a power of two take every second slope of twice the number.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-bias * (i + 1) / power) for i in range(power)]
    further = [2 ** (-bias * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return tuple((slopes + further)[:num_heads])
