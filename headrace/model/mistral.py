"""The Mistral family (Jiang et al. 2023): Llama with a sliding window. GGUF files call it llama."""

from headrace.model import from_config, llama
from headrace.model.family import ConfigLayout, Family
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    # Null means no window; a missing field means the default.
    has_window = config.get("sliding_window", 4096) is not None
    window = config.integer("sliding_window", 4096) if has_window else 0
    windows = from_config.sliding_windows(config, window)
    return from_config.decoder_spec(
        config, "mistral", max_context=131_072, kv_heads=8, windows=windows
    )


MISTRAL = Family(
    "mistral",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("MistralForCausalLM", "mistral"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
)
