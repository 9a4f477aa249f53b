"""StarCoder2 (Lozhkov et al. 2024): LayerNorm, biases everywhere, an MLP without a gate."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split, weights
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    windows = from_config.sliding_windows(config, config.integer("sliding_window", 0))
    spec = from_config.decoder_spec(
        config,
        "starcoder2",
        max_context=4096,
        kv_heads=2,
        eps_field="norm_epsilon",
        default_eps=1e-5,
        tied=True,
        windows=windows,
        computed=("hidden_act",),
    )
    bias = config.flag("use_bias", True)
    return replace(
        spec,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        activation=from_config.activation(config, "hidden_act", "gelu_pytorch_tanh"),
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    return replace(from_gguf.decoder_spec(fields, tensors, "starcoder2"), activation="gelu_tanh")


_MLP = weights({}, "model.layers.{}", {"up": "mlp.c_fc", "down": "mlp.c_proj"})

STARCODER2 = Family(
    "starcoder2",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("Starcoder2ForCausalLM", "starcoder2"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS | _MLP),
    ),
    gguf=GgufLayout(
        architectures=("starcoder2",), spec=_gguf_spec, tensors=half_split(from_gguf.TENSORS)
    ),
)
