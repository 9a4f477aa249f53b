"""Phi-1, Phi-1.5 and Phi-2 (2023): attention and an MLP without a gate in parallel."""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, parallel
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import fused_qkv, half_split, weights
from headrace.model.spec import ModelSpec


def _with_biases(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        norm="layer",
        gated_mlp=False,
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _config_spec(config: Fields) -> ModelSpec:
    spec = from_config.decoder_spec(
        config,
        "phi2",
        max_context=2048,
        partial=0.5,
        eps_field="layer_norm_eps",
        default_eps=1e-5,
        computed=("hidden_act",),
    )
    activation = from_config.activation(config, "hidden_act", "gelu_new")
    return _with_biases(replace(spec, activation=activation))


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    return _with_biases(
        replace(from_gguf.decoder_spec(fields, tensors, "phi2"), activation="gelu_tanh")
    )


_CONFIG_TENSORS = weights(
    {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.final_layernorm"},
    "model.layers.{}",
    {
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    },
)

PHI2 = Family(
    "phi2",
    decoder(parallel),
    config=ConfigLayout(
        architectures=("PhiForCausalLM", "phi"),
        spec=_config_spec,
        tensors=half_split(_CONFIG_TENSORS),
    ),
    gguf=GgufLayout(
        architectures=("phi2",),
        spec=_gguf_spec,
        tensors=half_split(from_gguf.TENSORS),
        alternatives=(fused_qkv("blk.{}.attn_qkv.weight", "blocks", bias="blk.{}.attn_qkv.bias"),),
    ),
)
