"""The Gemma family: Gemma 2 (2024) and 3 (2025).

Gemma 2 caps scores and logits. Gemma 3 normalises queries and keys, and has two rotary bases.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, sandwich
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors, TensorSource
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec, RopeSpec, layer_range

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
    """`caps`: default soft caps of scores and logits; null in the file means no cap."""
    spec = from_config.decoder_spec(
        config,
        architecture,
        max_context=131_072 if rope else 8192,
        kv_heads=4,
        head_dim=256,
        rope=rope,
        tied=True,
        computed=_COMPUTED,
    )
    bias, window = config.flag("attention_bias", False), config.integer("sliding_window", 4096)

    def cap(key: str, default: float) -> float:
        return (config.optional_number(key) or 0.0) if key in config else default

    return replace(
        spec,
        windows=from_config.layer_windows(config, window, period),
        activation=from_config.activation(
            config, "hidden_activation", config.string("hidden_act", "gelu_pytorch_tanh")
        ),
        embedding_scale=spec.dim**0.5,
        attention_scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=cap("attn_logit_softcapping", caps[0]),
        logit_softcap=cap("final_logit_softcapping", caps[1]),
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
    rope = from_config.rope_spec(
        config, head_dim, context, theta=1e6, kind_of_layer="full_attention"
    )
    if "sliding_attention" in config.section("rope_parameters"):
        window_rope = from_config.rope_spec(
            config, head_dim, context, kind_of_layer="sliding_attention"
        )
    else:
        # Before transformers 5, the base has a field of its own.
        window_rope = RopeSpec(head_dim, config.number("rope_local_base_freq", 10000.0))
    period = config.integer("_sliding_window_pattern", config.integer("sliding_window_pattern", 6))
    spec = _config_spec(config, "gemma3", period, rope, (0.0, 0.0))
    return replace(
        spec,
        qk_norm="head",
        window_rope=window_rope,
        # Google's files state the context after the linear rule.
        max_context=context if rope.scaling == "linear" else spec.max_context,
    )


def _gguf_spec(
    fields: Fields, tensors: Tensors, architecture: str, period: int, large: int
) -> ModelSpec:
    """`large`: layers of the 27B model, whose scores are scaled by the width per head."""
    computed = (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention.sliding_window_pattern",
    )
    spec = from_gguf.decoder_spec(fields, tensors, architecture, computed=computed)
    window = fields.integer(f"{architecture}.attention.sliding_window", 4096)
    scaled_by = spec.dim / spec.num_heads if spec.num_layers == large else spec.head_dim
    return replace(
        spec,
        windows=tuple(
            window if (layer + 1) % period else 0 for layer in layer_range(spec.num_layers)
        ),
        activation="gelu_tanh",
        embedding_scale=spec.dim**0.5,
        attention_scale=scaled_by**-0.5,
        attention_softcap=fields.number(f"{architecture}.attn_logit_softcapping", 0.0),
        logit_softcap=fields.number(f"{architecture}.final_logit_softcapping", 0.0),
    )


def _gemma2_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    return _gguf_spec(fields, tensors, "gemma2", 2, 46)


def _gemma3_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = _gguf_spec(fields, tensors, "gemma3", 6, 62)
    window_rope = RopeSpec(spec.rotary_dim, fields.number("gemma3.rope.freq_base_swa", 10000.0))
    return replace(spec, qk_norm="head", window_rope=window_rope)


def _norms_plus_one(tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
    return {
        name: replace(stored, offset=1.0) if name.endswith("norm") else stored
        for name, stored in tensors.items()
    }


_POST_NORMS = {
    "layers.{}.attn_post_norm": TensorSource("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.mlp_norm": TensorSource("model.layers.{}.pre_feedforward_layernorm.weight"),
    "layers.{}.mlp_post_norm": TensorSource("model.layers.{}.post_feedforward_layernorm.weight"),
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
