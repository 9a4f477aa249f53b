"""BLOOM (Le Scao et al. 2022): ALiBi, LayerNorm (also after the embedding), biases everywhere."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import fused_qkv, weights
from headrace.model.spec import ModelSpec


def _as_bloom(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        rope=None,
        alibi_bias=8.0,
        embedding_norm=True,
        activation="gelu_tanh",
        norm="layer",
        gated_mlp=False,
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _config_spec(config: Fields) -> ModelSpec:
    config.require_neutral({"apply_residual_connection_post_layernorm": (False,)})
    spec = from_config.decoder_spec(
        config,
        "bloom",
        max_context=2048,
        eps_field="layer_norm_epsilon",
        default_eps=1e-5,
        tied=True,
    )
    return _as_bloom(spec)


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    computed = ("attention.max_alibi_bias",)
    return _as_bloom(from_gguf.decoder_spec(fields, tensors, "bloom", computed=computed))


_QKV = "transformer.h.{}.self_attention.query_key_value"

BLOOM = Family(
    "bloom",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("BloomForCausalLM", "bloom"),
        spec=_config_spec,
        tensors=weights(
            {
                "embed": "transformer.word_embeddings",
                "embed_norm": "transformer.word_embeddings_layernorm",
                "head": "lm_head",
                "norm": "transformer.ln_f",
            },
            "transformer.h.{}",
            {
                "attn_norm": "input_layernorm",
                "o": "self_attention.dense",
                "mlp_norm": "post_attention_layernorm",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
        )
        | fused_qkv(f"{_QKV}.weight", "groups", is_half_split=False, bias=f"{_QKV}.bias"),
        fields={
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
    ),
    gguf=GgufLayout(
        architectures=("bloom",),
        spec=_gguf_spec,
        tensors=from_gguf.TENSORS
        | fused_qkv(
            "blk.{}.attn_qkv.weight", "blocks", is_half_split=False, bias="blk.{}.attn_qkv.bias"
        ),
    ),
)
