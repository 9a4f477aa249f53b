"""The Mistral family (Jiang et al. 2023): Llama with a sliding window. GGUF files call it llama."""

from headrace.model import from_config, llama
from headrace.model.family import ConfigLayout, Family
from headrace.model.fields import Fields
from headrace.model.places import half_split
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    slides = (
        config.get("sliding_window", 4096) is not None
    )  # a null says "none", an absent field the default
    windows = from_config.sliding_windows(
        config, config.integer("sliding_window", 4096) if slides else 0
    )
    return from_config.decoder(config, "mistral", max_context=131_072, kv_heads=8, windows=windows)


MISTRAL = Family(
    "mistral",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("MistralForCausalLM", "mistral"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
)
