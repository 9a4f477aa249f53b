"""The Gemma family: Gemma 2 (2024) and 3 (2025).

Norms before and behind attention and MLP, a scaled embedding, windows in most layers. Gemma 2 caps
scores and logits; Gemma 3 normalises queries and keys instead, and has a rotary base of its own for
layers with a window.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, sandwich
from headrace.model.family import ConfigLayout, Family, GgufLayout, Stored, Tensors
from headrace.model.fields import Fields
from headrace.model.places import half_split
from headrace.model.spec import ModelSpec, RopeSpec

_COMPUTED = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "hidden_act",
)


def _config_spec(
    config: Fields, architecture: str, period: int, rope: RopeSpec | None, caps: tuple[float, float]
) -> ModelSpec:
    """`caps` are those of scores and logits where the file has none; a null in the file is none,
    too.
    """
    spec = from_config.decoder(
        config,
        architecture,
        max_context=131_072 if rope else 8192,
        kv_heads=4,
        head_dim=256,
        rotary=rope,
        tied=True,
        computed=_COMPUTED,
    )
    bias, window = config.flag("attention_bias", False), config.integer("sliding_window", 4096)
    cap, logit_cap = (
        (config.optional_number(key) or 0.0) if key in config else default
        for key, default in zip(
            ("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True
        )
    )
    return replace(
        spec,
        windows=from_config.layer_windows(config, window, period),
        activation=from_config.activation(
            config, "hidden_activation", config.string("hidden_act", "gelu_pytorch_tanh")
        ),
        embedding_scale=spec.dim**0.5,
        attention_scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=cap,
        logit_softcap=logit_cap,
        qkv_bias=bias,
        output_bias=bias,
    )


def _gemma2_config(config: Fields) -> ModelSpec:
    return _config_spec(config, "gemma2", 2, None, (50.0, 30.0))


def _gemma3_config(config: Fields) -> ModelSpec:
    head_dim, context = (
        config.integer("head_dim", 256),
        config.integer("max_position_embeddings", 131_072),
    )
    rope = from_config.rope(config, head_dim, context, theta=1e6, kind_of_layer="full_attention")
    if "sliding_attention" in config.section("rope_parameters"):
        window_rope = from_config.rope(config, head_dim, context, kind_of_layer="sliding_attention")
    else:  # before transformers 5
        window_rope = RopeSpec(head_dim, config.number("rope_local_base_freq", 10000.0))
    period = config.integer("_sliding_window_pattern", config.integer("sliding_window_pattern", 6))
    return replace(
        _config_spec(config, "gemma3", period, rope, (0.0, 0.0)),
        qk_norm="head",
        window_rope=window_rope,
    )


def _gguf_spec(
    fields: Fields, tensors: Tensors, architecture: str, period: int, large: int
) -> ModelSpec:
    """`large` is the number of layers of the one size whose scores are scaled by the width of all
    heads (27B).
    """
    computed = (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention.sliding_window_pattern",
    )
    spec = from_gguf.decoder(fields, tensors, architecture, computed=computed)
    window = fields.integer(f"{architecture}.attention.sliding_window", 4096)
    return replace(
        spec,
        windows=tuple(window if (layer + 1) % period else 0 for layer in range(spec.num_layers)),
        activation="gelu_tanh",
        embedding_scale=spec.dim**0.5,
        attention_scale=(spec.dim / spec.num_heads if spec.num_layers == large else spec.head_dim)
        ** -0.5,
        attention_softcap=fields.number(f"{architecture}.attn_logit_softcapping", 0.0),
        logit_softcap=fields.number(f"{architecture}.final_logit_softcapping", 0.0),
    )


def _gemma2_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    return _gguf_spec(fields, tensors, "gemma2", 2, 46)


def _gemma3_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = _gguf_spec(fields, tensors, "gemma3", 6, 62)
    local = RopeSpec(spec.rotary_dim, fields.number("gemma3.rope.freq_base_swa", 10000.0))
    return replace(spec, qk_norm="head", window_rope=local)


def _norms_plus_one(tensors: dict[str, Stored]) -> dict[str, Stored]:
    return {
        name: replace(stored, plus=1.0) if name.endswith("norm") else stored
        for name, stored in tensors.items()
    }


_POST_NORMS = {
    "layers.{}.attn_post_norm": Stored("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.mlp_norm": Stored("model.layers.{}.pre_feedforward_layernorm.weight"),
    "layers.{}.mlp_post_norm": Stored("model.layers.{}.post_feedforward_layernorm.weight"),
}
_CONFIG_TENSORS = _norms_plus_one(half_split(from_config.TENSORS | _POST_NORMS))
_GGUF_TENSORS = half_split(from_gguf.TENSORS)

GEMMA2 = Family(
    "gemma2",
    decoder(sandwich),
    config=ConfigLayout(
        architectures=("Gemma2ForCausalLM", "gemma2"), spec=_gemma2_config, tensors=_CONFIG_TENSORS
    ),
    gguf=GgufLayout(architectures=("gemma2",), spec=_gemma2_gguf, tensors=_GGUF_TENSORS),
)
GEMMA3 = Family(
    "gemma3",
    decoder(sandwich),
    config=ConfigLayout(
        architectures=("Gemma3ForCausalLM", "gemma3_text"),
        spec=_gemma3_config,
        tensors=_CONFIG_TENSORS,
    ),
    gguf=GgufLayout(architectures=("gemma3",), spec=_gemma3_gguf, tensors=_GGUF_TENSORS),
)
