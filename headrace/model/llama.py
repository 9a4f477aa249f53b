"""The Llama family: Llama 2 and 3, SmolLM2 (Touvron et al. 2023).

The pre-norm decoder with rotary positions, grouped query heads and a gated MLP. Other families share the equations, and differ in
what `ModelSpec` says: biases, windows, rope scaling, tied embeddings.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors, half_split, plain
from headrace.model.fields import Fields
from headrace.model.rope import inverse_frequencies
from headrace.model.spec import ModelSpec
from headrace.program.op import Value, Weight
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
    return g.norm(x, g.vector(name, spec.dim), spec.norm_eps)


def _linear(g: Tracer, x: Value, name: str, rows: int, bias: bool) -> Value:
    has_bias: Weight | None = g.vector(f"{name}_bias", rows) if bias else None
    return g.linear(x, g.weight(name, rows, x.width), has_bias)


def _config_spec(config: Fields) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    windows = from_config.sliding_windows(config, 0)
    spec = from_config.decoder(config, "llama", max_context=2048, kv_heads=None, windows=windows)
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias", False))


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    return from_gguf.decoder(fields, tensors, "llama")


CONFIG_TENSORS = plain(
    {
        "embed": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "norm": "model.norm.weight",
        "layers.{}.attn_norm": "model.layers.{}.input_layernorm.weight",
        "layers.{}.q": "model.layers.{}.self_attn.q_proj.weight",
        "layers.{}.k": "model.layers.{}.self_attn.k_proj.weight",
        "layers.{}.v": "model.layers.{}.self_attn.v_proj.weight",
        "layers.{}.o": "model.layers.{}.self_attn.o_proj.weight",
        "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
        "layers.{}.gate": "model.layers.{}.mlp.gate_proj.weight",
        "layers.{}.up": "model.layers.{}.mlp.up_proj.weight",
        "layers.{}.down": "model.layers.{}.mlp.down_proj.weight",
        "layers.{}.q_bias": "model.layers.{}.self_attn.q_proj.bias",
        "layers.{}.k_bias": "model.layers.{}.self_attn.k_proj.bias",
        "layers.{}.v_bias": "model.layers.{}.self_attn.v_proj.bias",
        "layers.{}.o_bias": "model.layers.{}.self_attn.o_proj.bias",
        "layers.{}.gate_bias": "model.layers.{}.mlp.gate_proj.bias",
        "layers.{}.up_bias": "model.layers.{}.mlp.up_proj.bias",
        "layers.{}.down_bias": "model.layers.{}.mlp.down_proj.bias",
    }
)
GGUF_TENSORS = plain(
    {
        "embed": "token_embd.weight",
        "head": "output.weight",
        "norm": "output_norm.weight",
        "layers.{}.attn_norm": "blk.{}.attn_norm.weight",
        "layers.{}.q": "blk.{}.attn_q.weight",
        "layers.{}.k": "blk.{}.attn_k.weight",
        "layers.{}.v": "blk.{}.attn_v.weight",
        "layers.{}.o": "blk.{}.attn_output.weight",
        "layers.{}.mlp_norm": "blk.{}.ffn_norm.weight",
        "layers.{}.gate": "blk.{}.ffn_gate.weight",
        "layers.{}.up": "blk.{}.ffn_up.weight",
        "layers.{}.down": "blk.{}.ffn_down.weight",
        "layers.{}.q_bias": "blk.{}.attn_q.bias",
        "layers.{}.k_bias": "blk.{}.attn_k.bias",
        "layers.{}.v_bias": "blk.{}.attn_v.bias",
        "layers.{}.o_bias": "blk.{}.attn_output.bias",
        "layers.{}.gate_bias": "blk.{}.ffn_gate.bias",
        "layers.{}.up_bias": "blk.{}.ffn_up.bias",
        "layers.{}.down_bias": "blk.{}.ffn_down.bias",
    }
)

LLAMA = Family(
    "llama",
    forward,
    config=ConfigLayout(
        architectures=("LlamaForCausalLM", "llama"),
        spec=_config_spec,
        tensors=half_split(CONFIG_TENSORS),
        ignored=from_config.IGNORED,
    ),
    # Converters permute the rows of queries and keys to interleaved pairs, for this architecture alone.
    gguf=GgufLayout(architectures=("llama",), spec=_gguf_spec, tensors=GGUF_TENSORS, ignored=from_gguf.IGNORED),
)
