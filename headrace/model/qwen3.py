"""The Qwen3 family (Yang et al. 2025): Qwen2 with norms over each head of queries and keys in the
place of biases.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.places import half_split
from headrace.model.spec import ModelSpec


def config_spec(config: Fields, architecture: str = "qwen3", *computed: str) -> ModelSpec:
    """The specification of a model with head norms, of this or a related architecture."""
    window = (
        config.integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else 0
    )
    windows = from_config.sliding_windows(
        config, window, config.integer("max_window_layers", 28), by_layer=True
    )
    bias, given = config.flag("attention_bias", False), ("attention_bias", *computed)
    spec = from_config.decoder(
        config,
        architecture,
        max_context=32_768,
        kv_heads=32,
        head_dim=128,
        windows=windows,
        computed=given,
    )
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm="head")


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    return replace(from_gguf.decoder(fields, tensors, "qwen3"), qk_norm="head")


QWEN3 = Family(
    "qwen3",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("Qwen3ForCausalLM", "qwen3"),
        spec=config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
    gguf=GgufLayout(
        architectures=("qwen3",), spec=_gguf_spec, tensors=half_split(from_gguf.TENSORS)
    ),
)
