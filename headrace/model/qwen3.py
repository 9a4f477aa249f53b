"""The Qwen3 family (Yang et al. 2025): Llama with a norm over each head of queries and keys."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec


def config_spec(config: Fields, architecture: str = "qwen3", *computed: str) -> ModelSpec:
    has_window = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window", 4096) if has_window else 0
    windows = from_config.sliding_windows(
        config, window, config.integer("max_window_layers", 28), by_layer=True
    )
    # Some files name the norms that every Qwen3 has.
    config.require_neutral({"use_qk_norm": (True,)})
    bias = config.flag("attention_bias", False)
    spec = from_config.decoder_spec(
        config,
        architecture,
        max_context=32_768,
        kv_heads=32,
        head_dim=128,
        windows=windows,
        computed=("attention_bias", "use_qk_norm", *computed),
    )
    return replace(spec, qkv_bias=bias, output_bias=bias, qk_norm="head")


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    name = fields.string("general.architecture", "qwen3").lower()
    # Sections of rotary pairs count time, height and width, which are equal for text.
    computed = ("rope.dimension_sections",) if name == "qwen3vl" else ()
    spec = from_gguf.decoder_spec(fields, tensors, name, computed=computed)
    return replace(spec, architecture="qwen3", qk_norm="head")


QWEN3 = Family(
    "qwen3",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("Qwen3ForCausalLM", "qwen3"),
        spec=config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
    gguf=GgufLayout(
        architectures=("qwen3", "qwen3vl"), spec=_gguf_spec, tensors=half_split(from_gguf.TENSORS)
    ),
)
