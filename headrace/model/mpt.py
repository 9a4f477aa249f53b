"""MPT (MosaicML 2023): ALiBi, LayerNorm, no biases."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import fused_qkv, weights
from headrace.model.spec import ModelSpec


def _as_mpt(spec: ModelSpec, alibi_bias: float) -> ModelSpec:
    return replace(
        spec, rope=None, alibi_bias=alibi_bias, norm="layer", gated_mlp=False, activation="gelu"
    )


def _config_spec(config: Fields) -> ModelSpec:
    config.require_neutral({"no_bias": (True,), "logit_scale": ()})
    attention = config.section("attn_config")
    attention.require_neutral(
        {
            "alibi": (True,),
            "clip_qkv": (0,),
            "qk_ln": (False,),
            "prefix_lm": (False,),
            "attn_type": ("multihead_attention",),
        }
    )
    spec = from_config.decoder_spec(
        config,
        "mpt",
        max_context=2048,
        eps_field="layer_norm_epsilon",
        default_eps=1e-5,
        tied=True,
        computed=("logit_scale",),
    )
    width = config.integer("expansion_ratio", 4) * spec.dim
    spec = replace(spec, ffn_dim=width, attention_scale=attention.number("softmax_scale", 0.0))
    return _as_mpt(spec, attention.number("alibi_bias_max", 8))


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "mpt", computed=("attention.max_alibi_bias",))
    return _as_mpt(spec, fields.number("mpt.attention.max_alibi_bias", 8.0))


MPT = Family(
    "mpt",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("MptForCausalLM", "mpt", "MPTForCausalLM"),
        spec=_config_spec,
        tensors=weights(
            {"embed": "transformer.wte", "head": "lm_head", "norm": "transformer.norm_f"},
            "transformer.blocks.{}",
            {
                "attn_norm": "norm_1",
                "o": "attn.out_proj",
                "mlp_norm": "norm_2",
                "up": "ffn.up_proj",
                "down": "ffn.down_proj",
            },
        )
        | fused_qkv("transformer.blocks.{}.attn.Wqkv.weight", "blocks", is_half_split=False),
        fields={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
    ),
    gguf=GgufLayout(
        architectures=("mpt",),
        spec=_gguf_spec,
        tensors=from_gguf.TENSORS
        | fused_qkv("blk.{}.attn_qkv.weight", "blocks", is_half_split=False),
    ),
)
