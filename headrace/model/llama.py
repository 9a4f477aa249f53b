"""The Llama family: Llama 2 and 3, SmolLM2 (Touvron et al. 2023).

Most other families share its tensor names.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, sequential
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    windows = from_config.sliding_windows(config, 0)
    spec = from_config.decoder_spec(
        config,
        "llama",
        max_context=2048,
        windows=windows,
        computed=("attention_bias", "hidden_act", "mlp_bias"),
    )
    return replace(
        spec,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        # ReLULLaMA and ProSparse (Song et al. 2024) have ReLU gates.
        activation=from_config.activation(config, "hidden_act", "silu"),
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "llama", computed=("expert_count",))
    is_mixtral = fields.integer("llama.expert_count", 0) > 0
    if not is_mixtral:
        return spec
    return replace(spec, experts=from_gguf.expert_spec(fields, tensors, "llama", spec))


LLAMA = Family(
    "llama",
    decoder(sequential),
    config=ConfigLayout(
        architectures=("LlamaForCausalLM", "llama"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
    # Only for this architecture, converters reorder queries and keys to neighbouring rotary pairs.
    gguf=GgufLayout(
        architectures=("llama",), spec=_gguf_spec, tensors=from_gguf.TENSORS | from_gguf.EXPERTS
    ),
)
