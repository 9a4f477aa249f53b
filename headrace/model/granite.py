"""The Granite family (IBM 2024): Llama with scaled embedding, scores, residuals and logits."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    factors = (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    spec = from_config.decoder_spec(
        config, "granite", max_context=2048, computed=(*factors, "attention_bias", "mlp_bias")
    )
    embedding, attention, residual, logits = (config.positive(factor, 1.0) for factor in factors)
    bias = config.flag("attention_bias", False)
    return replace(
        spec,
        embedding_scale=embedding,
        attention_scale=attention,
        residual_scale=residual,
        logit_scale=1 / logits,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(
        fields,
        tensors,
        "granite",
        computed=("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
    )
    return replace(
        spec,
        embedding_scale=fields.number("granite.embedding_scale", 1.0),
        attention_scale=fields.number("granite.attention.scale", 0.0),
        residual_scale=fields.number("granite.residual_scale", 1.0),
        logit_scale=1 / fields.positive("granite.logit_scale", 1.0),
    )


GRANITE = Family(
    "granite",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("GraniteForCausalLM", "granite"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
    gguf=GgufLayout(architectures=("granite",), spec=_gguf_spec, tensors=from_gguf.TENSORS),
)
