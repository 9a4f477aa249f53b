"""SmolLM3 (Hugging Face 2025): Llama without rotation in every fourth layer."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec, layer_range


def _config_spec(config: Fields) -> ModelSpec:
    window = config.integer("sliding_window", 0) if config.flag("use_sliding_window", False) else 0
    windows = from_config.sliding_windows(config, window, by_layer=True)
    spec = from_config.decoder_spec(
        config,
        "smollm3",
        max_context=32_768,
        kv_heads=4,
        theta=2e6,
        windows=windows,
        tied=True,
        computed=("attention_bias", "mlp_bias", "no_rope_layers"),
    )
    bias = config.flag("attention_bias", False)
    period = max(config.integer("no_rope_layer_interval", 4), 1)
    rotated = config.get("no_rope_layers") or _default_rotated(spec, period)
    if (
        not isinstance(rotated, list | tuple)
        or len(rotated) != spec.num_layers
        or not {*map(str, rotated)} <= {"0", "1", "True", "False"}
    ):
        raise config.unsupported("no_rope_layers")
    return replace(
        spec,
        rotated=tuple(map(bool, rotated)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _default_rotated(spec: ModelSpec, period: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % period > 0 for layer in layer_range(spec.num_layers))


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "smollm3")
    return replace(spec, rotated=_default_rotated(spec, 4))


SMOLLM3 = Family(
    "smollm3",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("SmolLM3ForCausalLM", "smollm3"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
    gguf=GgufLayout(architectures=("smollm3",), spec=_gguf_spec, tensors=from_gguf.TENSORS),
)
