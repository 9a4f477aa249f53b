"""Nemotron (NVIDIA 2024): squared ReLU without a gate (So et al. 2021), partly rotated heads.

Folders store the weights of LayerNorm minus 1.
"""

from collections.abc import Mapping
from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors, TensorSource
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    spec = from_config.decoder_spec(
        config,
        "nemotron",
        max_context=4096,
        partial=0.5,
        eps_field="norm_eps",
        default_eps=1e-5,
        computed=("attention_bias", "hidden_act", "mlp_bias"),
    )
    if config.string("hidden_act", "relu2") != "relu2":
        raise config.unsupported("hidden_act")
    bias = config.flag("attention_bias", False)
    return replace(
        spec,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        gated_mlp=False,
        activation="relu",
        squares_activation=True,
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "nemotron")
    return replace(spec, activation="relu", squares_activation=True)


def _plus_one(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    return {
        name: replace(stored, offset=1.0) if name.endswith("norm") else stored
        for name, stored in tensors.items()
    }


NEMOTRON = Family(
    "nemotron",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("NemotronForCausalLM", "nemotron"),
        spec=_config_spec,
        tensors=half_split(_plus_one(from_config.TENSORS)),
    ),
    # Converters add the 1.
    gguf=GgufLayout(
        architectures=("nemotron",), spec=_gguf_spec, tensors=half_split(from_gguf.TENSORS)
    ),
)
