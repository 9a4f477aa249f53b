"""BLOOM (Le Scao et al. 2022): ALiBi in the place of positions, LayerNorm, also behind the
embedding, and biases everywhere.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.places import fused_qkv, weights
from headrace.model.spec import ModelSpec


def _as_bloom(spec: ModelSpec) -> ModelSpec:
    spec = replace(
        spec,
        rope=None,
        alibi_bias=8.0,
        embedding_norm=True,
        norm="layer",
        gated_mlp=False,
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
    return replace(spec, activation="gelu_tanh")


def _config_spec(config: Fields) -> ModelSpec:
    config.require_neutral({"apply_residual_connection_post_layernorm": (False,)})
    return _as_bloom(
        from_config.decoder(
            config, "bloom", max_context=2048, eps="layer_norm_epsilon", default_eps=1e-5, tied=True
        )
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    return _as_bloom(
        from_gguf.decoder(fields, tensors, "bloom", computed=("attention.max_alibi_bias",))
    )


_QKV = "transformer.h.{}.self_attention.query_key_value"

BLOOM = Family(
    "bloom",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("BloomForCausalLM", "bloom"),
        spec=_config_spec,
        tensors=weights(
            {
                **{
                    "embed": "transformer.word_embeddings",
                    "embed_norm": "transformer.word_embeddings_layernorm",
                },
                **{"head": "lm_head", "norm": "transformer.ln_f"},
            },
            "transformer.h.{}",
            {
                **{
                    "attn_norm": "input_layernorm",
                    "o": "self_attention.dense",
                    "mlp_norm": "post_attention_layernorm",
                },
                **{"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
            },
        )
        | fused_qkv(f"{_QKV}.weight", "groups", split=False, bias=f"{_QKV}.bias"),
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
        | fused_qkv("blk.{}.attn_qkv.weight", "blocks", split=False, bias="blk.{}.attn_qkv.bias"),
    ),
)
