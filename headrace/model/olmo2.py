"""OLMo 2 (2024): norms after attention and MLP only, and over rows of queries and keys."""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, post_norm
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors, TensorSource
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    spec = from_config.decoder_spec(
        config, "olmo2", max_context=2048, default_eps=1e-5, computed=("attention_bias",)
    )
    bias = config.flag("attention_bias", False)
    return replace(spec, qk_norm="row", qkv_bias=bias, output_bias=bias)


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    return replace(from_gguf.decoder_spec(fields, tensors, "olmo2"), qk_norm="row")


_POST_NORMS = {
    "layers.{}.attn_post_norm": TensorSource("model.layers.{}.post_attention_layernorm.weight"),
    "layers.{}.mlp_post_norm": TensorSource("model.layers.{}.post_feedforward_layernorm.weight"),
}

OLMO2 = Family(
    "olmo2",
    decoder(post_norm),
    config=ConfigLayout(
        architectures=("Olmo2ForCausalLM", "olmo2"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS | _POST_NORMS),
    ),
    gguf=GgufLayout(
        architectures=("olmo2",), spec=_gguf_spec, tensors=half_split(from_gguf.TENSORS)
    ),
)
