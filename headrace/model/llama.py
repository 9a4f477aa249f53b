"""The Llama family: Llama 2 and 3, Mistral, Qwen2, SmolLM2 (Touvron et al. 2023; Jiang et al. 2023; Yang et al. 2024).

The pre-norm decoder with rotary positions, grouped query heads and a gated MLP. Families differ only in what `ModelSpec`
says: biases, window, rope scaling, tied embeddings.
"""

from headrace.model.rope import inverse_frequencies
from headrace.model.spec import ModelSpec
from headrace.program.ops import Value, Weight
from headrace.program.trace import Tracer


def forward(spec: ModelSpec, g: Tracer) -> Value:
    """Logits [logit rows, vocab] of one step."""
    embedding = g.weight("embed", spec.vocab_size, spec.dim)
    frequencies, scale = inverse_frequencies(spec.rope, spec.max_context)
    angles = g.rope_angles(tuple(frequencies.tolist()), scale)
    x = g.embed(embedding)
    for layer in range(spec.num_layers):
        attended = _attend(g, spec, layer, x, angles)
        if layer == spec.num_layers - 1:  # beyond the last KV write only the rows that need logits matter
            attended, x = g.gather_rows(attended), g.gather_rows(x)
        x = g.add(x, _linear(g, attended, f"layers.{layer}.o", spec.dim, spec.output_bias))
        x = g.add(x, _mlp(g, spec, layer, x))
    x = _norm(g, spec, x, "norm")
    head = embedding if spec.tied_embeddings else g.weight("head", spec.vocab_size, spec.dim)
    return g.linear(x, head)


def _attend(g: Tracer, spec: ModelSpec, layer: int, x: Value, angles: Value) -> Value:
    name = f"layers.{layer}"
    x = _norm(g, spec, x, f"{name}.attn_norm")
    q = _linear(g, x, f"{name}.q", spec.num_heads * spec.head_dim, spec.qkv_bias)
    k = _linear(g, x, f"{name}.k", spec.num_kv_heads * spec.head_dim, spec.qkv_bias)
    v = _linear(g, x, f"{name}.v", spec.num_kv_heads * spec.head_dim, spec.qkv_bias)
    q = g.rope(q, angles, spec.head_dim)
    g.kv_write(g.rope(k, angles, spec.head_dim), v, layer)
    return g.attention(q, layer, spec.num_kv_heads, spec.head_dim, spec.window(layer))


def _mlp(g: Tracer, spec: ModelSpec, layer: int, x: Value) -> Value:
    name = f"layers.{layer}"
    x = _norm(g, spec, x, f"{name}.mlp_norm")
    gate = _linear(g, x, f"{name}.gate", spec.ffn_dim, spec.mlp_bias)
    up = _linear(g, x, f"{name}.up", spec.ffn_dim, spec.mlp_bias)
    return _linear(g, g.glu(gate, up), f"{name}.down", spec.dim, spec.mlp_bias)


def _norm(g: Tracer, spec: ModelSpec, x: Value, name: str) -> Value:
    return g.norm(x, g.weight(name, 1, spec.dim), spec.norm_eps)


def _linear(g: Tracer, x: Value, name: str, rows: int, bias: bool) -> Value:
    has_bias: Weight | None = g.weight(f"{name}_bias", 1, rows) if bias else None
    return g.linear(x, g.weight(name, rows, x.width), has_bias)
