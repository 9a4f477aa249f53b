"""The GPT-NeoX family: GPT-NeoX-20B (Black et al. 2022) and Pythia (Biderman et al. 2023)."""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import by_spec, decoder
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import fused_qkv, weights
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    partial = config.number("rotary_pct", 0.25)
    spec = from_config.decoder_spec(
        config,
        "gpt_neox",
        max_context=2048,
        partial=partial,
        eps_field="layer_norm_eps",
        default_eps=1e-5,
        computed=("hidden_act", "attention_bias"),
    )
    bias = config.flag("attention_bias", True)
    return replace(
        spec,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        gated_mlp=False,
        activation=from_config.activation(config, "hidden_act", "gelu"),
        block="parallel_two_norms" if config.flag("use_parallel_residual", True) else "sequential",
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "gptneox", computed=("use_parallel_residual",))
    parallel = fields.flag("gptneox.use_parallel_residual", True)
    return replace(
        spec,
        architecture="gpt_neox",
        activation="gelu",
        block="parallel_two_norms" if parallel else "sequential",
    )


_QKV = "gpt_neox.layers.{}.attention.query_key_value"

GPT_NEOX = Family(
    "gpt_neox",
    decoder(by_spec),
    config=ConfigLayout(
        architectures=("GPTNeoXForCausalLM", "gpt_neox"),
        spec=_config_spec,
        tensors=weights(
            {
                "embed": "gpt_neox.embed_in",
                "head": "embed_out",
                "norm": "gpt_neox.final_layer_norm",
            },
            "gpt_neox.layers.{}",
            {
                "attn_norm": "input_layernorm",
                "o": "attention.dense",
                "mlp_norm": "post_attention_layernorm",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
        )
        | fused_qkv(f"{_QKV}.weight", "groups", bias=f"{_QKV}.bias"),
        ignored=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    ),
    gguf=GgufLayout(
        architectures=("gptneox",),
        spec=_gguf_spec,
        tensors=from_gguf.TENSORS
        | fused_qkv("blk.{}.attn_qkv.weight", "blocks", bias="blk.{}.attn_qkv.bias"),
    ),
)
