"""The Mistral family (Jiang et al. 2023): Llama with a sliding window. GGUF files call it llama.

Ministral 3 (2025) scales queries by 1 + beta * log(1 + floor(position / original context)), which
is 1 before the original context. Its context ends there.
"""

from dataclasses import replace

from headrace.model import from_config, llama
from headrace.model.family import ConfigLayout, Family
from headrace.model.fields import Fields, JsonFields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec

_ROPE, _BETA = "rope_parameters", "llama_4_scaling_beta"
_QUERY_FIELDS = (_BETA, "max_position_embeddings")
_MINISTRAL3 = ("Ministral3ForCausalLM", "ministral3")


def _config_spec(config: Fields) -> ModelSpec:
    rope = config.section(_ROPE)
    if config.get("model_type") == "ministral3" or rope.get(_BETA):
        return _ministral3(config, rope)
    return _mistral(config)


def _ministral3(config: Fields, rope: Fields) -> ModelSpec:
    other_rope = {key: value for key, value in rope.items() if key not in _QUERY_FIELDS}
    plain = {"sliding_window": None, **config, _ROPE: other_rope}
    spec = _mistral(JsonFields(plain, config.where))
    if not rope.number(_BETA, 0.0):
        return spec
    original = rope.integer("original_max_position_embeddings")
    return replace(spec, max_context=min(spec.max_context, original))


def _mistral(config: Fields) -> ModelSpec:
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
        architectures=("MistralForCausalLM", "mistral", *_MINISTRAL3),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
)
