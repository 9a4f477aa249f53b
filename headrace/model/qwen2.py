"""The Qwen2 family (Yang et al. 2024): Llama with biases on queries, keys and values.

MiMo (Xiaomi 2025) is a Qwen2 with layers for drafts.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, DraftLayers, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec


def _own_config_spec(config: Fields) -> ModelSpec:
    # MiMo's configuration says that there are biases.
    has_bias = config.flag("attention_bias", False)
    return config_spec(config, "qwen2", *(("attention_bias",) if has_bias else ()))


def config_spec(config: Fields, architecture: str = "qwen2", *computed: str) -> ModelSpec:
    has_window = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window", 4096) if has_window else 0
    windows = from_config.sliding_windows(
        config, window, config.integer("max_window_layers", 28), by_layer=True
    )
    spec = from_config.decoder_spec(
        config, architecture, max_context=32_768, kv_heads=32, windows=windows, computed=computed
    )
    return replace(spec, qkv_bias=True)


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    name = fields.string("general.architecture", "qwen2").lower()
    # A GGUF file does not name the layers that have the window.
    fields.require_neutral({f"{name}.attention.sliding_window": (0,)})
    # Sections of rotary pairs count time, height and width, which are equal for text.
    computed = ("rope.dimension_sections",) if name == "qwen2vl" else ()
    spec = from_gguf.decoder_spec(fields, tensors, name, computed=computed)
    return replace(spec, architecture="qwen2")


QWEN2 = Family(
    "qwen2",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("Qwen2ForCausalLM", "qwen2", "MiMoForCausalLM", "mimo"),
        spec=_own_config_spec,
        tensors=half_split(from_config.TENSORS),
        draft_layers=DraftLayers(
            prefix="model.mtp_layers.",
            follows_last=False,
            tensors={
                "token_norm": "token_layernorm.weight",
                "row_norm": "hidden_layernorm.weight",
                "join": "input_proj.weight",
                "norm": "final_layernorm.weight",
            },
            row_first=True,
            drafts_from_normed=True,
        ),
    ),
    gguf=GgufLayout(
        architectures=("qwen2", "qwen2vl"), spec=_gguf_spec, tensors=half_split(from_gguf.TENSORS)
    ),
)
