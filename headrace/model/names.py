"""Tensor names: ours, which the equations use, and those of the files we read; `{i}` is the layer."""

from headrace.model.spec import ModelSpec

LLAMA_GGUF: dict[str, str] = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "norm": "output_norm.weight",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.q": "blk.{i}.attn_q.weight",
    "layers.{i}.k": "blk.{i}.attn_k.weight",
    "layers.{i}.v": "blk.{i}.attn_v.weight",
    "layers.{i}.o": "blk.{i}.attn_output.weight",
    "layers.{i}.q_bias": "blk.{i}.attn_q.bias",
    "layers.{i}.k_bias": "blk.{i}.attn_k.bias",
    "layers.{i}.v_bias": "blk.{i}.attn_v.bias",
    "layers.{i}.o_bias": "blk.{i}.attn_output.bias",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.gate": "blk.{i}.ffn_gate.weight",
    "layers.{i}.up": "blk.{i}.ffn_up.weight",
    "layers.{i}.down": "blk.{i}.ffn_down.weight",
    "layers.{i}.gate_bias": "blk.{i}.ffn_gate.bias",
    "layers.{i}.up_bias": "blk.{i}.ffn_up.bias",
    "layers.{i}.down_bias": "blk.{i}.ffn_down.bias",
}

LLAMA_HF: dict[str, str] = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "norm": "model.norm.weight",
    "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.o_bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers.{i}.up_bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers.{i}.down_bias": "model.layers.{i}.mlp.down_proj.bias",
}


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the Llama family needs, by our name without the layer filled in, and its shape [rows, columns]."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, spec.dim), "norm": (spec.dim,)}
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab_size, spec.dim)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (spec.dim,),
        "q": (q, spec.dim),
        "k": (kv, spec.dim),
        "v": (kv, spec.dim),
        "o": (spec.dim, q),
        "mlp_norm": (spec.dim,),
        "gate": (spec.ffn_dim, spec.dim),
        "up": (spec.ffn_dim, spec.dim),
        "down": (spec.dim, spec.ffn_dim),
    }
    biased = ("q", "k", "v") * spec.qkv_bias + ("o",) * spec.output_bias + ("gate", "up", "down") * spec.mlp_bias
    layer |= {f"{name}_bias": layer[name][:1] for name in biased}
    return shapes | {f"layers.{{i}}.{name}": shape for name, shape in layer.items()}
