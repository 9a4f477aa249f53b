"""SmolLM3 (Hugging Face 2025): Llama with layers that do not rotate, each fourth."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.places import half_split
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    window = config.integer("sliding_window", 0) if config.flag("use_sliding_window", False) else 0
    windows = from_config.sliding_windows(config, window, by_layer=True)
    computed = ("attention_bias", "mlp_bias", "no_rope_layers")
    spec = from_config.decoder(
        config,
        "smollm3",
        max_context=32_768,
        kv_heads=4,
        theta=2e6,
        windows=windows,
        tied=True,
        computed=computed,
    )
    bias = config.flag("attention_bias", False)
    period = max(config.integer("no_rope_layer_interval", 4), 1)
    rotated = config.get("no_rope_layers") or _rotated(spec, period)
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


def _rotated(spec: ModelSpec, period: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % period > 0 for layer in range(min(spec.num_layers, 1 << 16)))


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder(fields, tensors, "smollm3")
    return replace(spec, rotated=_rotated(spec, 4))


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
