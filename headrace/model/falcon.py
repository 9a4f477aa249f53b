"""The Falcon family (Almazrouei et al. 2023): attention and MLP in parallel.

The 7B decoder has one KV head, the 40B decoder has several and two norms.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import Decoder, decoder, parallel
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import fused_qkv, weights
from headrace.model.spec import ModelSpec
from headrace.program.op import Value


def _new_decoder(d: Decoder, layer: int, x: Value) -> Value:
    normed = d.norm(x, f"layers.{layer}.own_attn_norm")
    attended, x = d.last_rows(layer, d.attend(layer, normed), x)
    y = d.add(x, d.output(layer, attended))
    return d.add(y, d.mlp(layer, d.norm(x, f"layers.{layer}.mlp_norm")))


def _block(d: Decoder, layer: int, x: Value) -> Value:
    return (parallel if d.spec.block == "parallel" else _new_decoder)(d, layer, x)


def _config_spec(config: Fields) -> ModelSpec:
    config.require_neutral(
        {"alibi": (False,), "parallel_attn": (True,), "bias": (False,), "multi_query": (True,)}
    )
    is_new = config.flag("new_decoder_architecture", False)
    if config.integer("num_ln_in_parallel_attn", 2 if is_new else 1) != (2 if is_new else 1):
        raise config.unsupported("num_ln_in_parallel_attn")
    spec = from_config.decoder_spec(
        config,
        "falcon",
        max_context=2048,
        eps_field="layer_norm_epsilon",
        default_eps=1e-5,
        tied=True,
    )
    return replace(
        spec,
        num_kv_heads=config.integer("num_kv_heads", spec.num_heads) if is_new else 1,
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        activation=from_config.activation(config, "activation", "gelu"),
        block="parallel_two_norms" if is_new else "parallel",
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "falcon")
    is_new = "blk.0.attn_norm_2.weight" in tensors
    return replace(spec, activation="gelu", block="parallel_two_norms" if is_new else "parallel")


FALCON = Family(
    "falcon",
    decoder(_block),
    config=ConfigLayout(
        architectures=("FalconForCausalLM", "falcon", "RWForCausalLM"),
        spec=_config_spec,
        tensors=weights(
            {"embed": "transformer.word_embeddings", "head": "lm_head", "norm": "transformer.ln_f"},
            "transformer.h.{}",
            {
                "attn_norm": "input_layernorm",
                "own_attn_norm": "ln_attn",
                "mlp_norm": "ln_mlp",
                "o": "self_attention.dense",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
        )
        | fused_qkv("transformer.h.{}.self_attention.query_key_value.weight", "groups"),
        fields={"intermediate_size": "ffn_hidden_size"},
    ),
    gguf=GgufLayout(
        architectures=("falcon",),
        spec=_gguf_spec,
        # A file of the new decoder stores the MLP's norm under the name of the old decoder's norm.
        tensors=from_gguf.TENSORS
        | weights({}, "blk.{}", {"own_attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"})
        | fused_qkv("blk.{}.attn_qkv.weight", "blocks"),
    ),
)
