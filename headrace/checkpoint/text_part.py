"""The text model of a multimodal `config.json`.

Its fields are in `text_config`, which omits the defaults of its class, or at the top level
(Qwen2-VL before transformers 4.52). The tables have the classes of transformers 5.24
(`models/*/configuration_*.py`). They only have models whose text rows see the rows that they see
in a text model: PaliGemma's prefixes, for example, are bidirectional.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.errors import FormatError
from headrace.model.fields import shown
from headrace.record import frozen

WHOLE_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "aya_vision": "cohere2",
        "cohere2_vision": "cohere2",
        "gemma3": "gemma3_text",
        "idefics2": "mistral",
        "idefics3": "llama",
        "internvl": "qwen2",
        "llava": "llama",
        "llava_next": "llama",
        "llava_next_video": "llama",
        "llava_onevision": "qwen2",
        "mistral3": "mistral",
        "qwen2_5_vl": "qwen2_5_vl_text",
        "qwen2_audio": "qwen2",
        "qwen2_vl": "qwen2_vl_text",
        "qwen3_vl": "qwen3_vl_text",
        "smolvlm": "llama",
        "video_llava": "llama",
        "vipllava": "llama",
        "voxtral": "llama",
    }
)
"""`model_type` of multimodal models, and the one of a `text_config` that names none."""


def _sizes(
    architecture: str,
    model_type: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    **others: Any,
) -> Mapping[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **others,
    }


_QWEN2_VL = _sizes(
    "Qwen2ForCausalLM", "qwen2", 8192, 29_568, 80, 64, 8, 152_064, rms_norm_eps=1e-5, rope_theta=1e6
)
TEXT_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _sizes("LlamaForCausalLM", "llama", 4096, 11_008, 32, 32, 32, 32_000),
        "mistral": _sizes("MistralForCausalLM", "mistral", 4096, 14_336, 32, 32, 8, 32_000),
        "ministral3": _sizes(
            "Ministral3ForCausalLM",
            "ministral3",
            4096,
            14_336,
            34,
            32,
            8,
            131_072,
            head_dim=128,
            max_position_embeddings=262_144,
            rms_norm_eps=1e-5,
        ),
        "qwen2": _sizes("Qwen2ForCausalLM", "qwen2", 4096, 22_016, 32, 32, 32, 151_936),
        "qwen2_vl_text": _QWEN2_VL,
        "qwen2_5_vl_text": _QWEN2_VL,
        "qwen3": _sizes("Qwen3ForCausalLM", "qwen3", 4096, 22_016, 32, 32, 32, 151_936),
        "qwen3_vl_text": _sizes(
            "Qwen3ForCausalLM",
            "qwen3",
            4096,
            22_016,
            32,
            32,
            32,
            151_936,
            max_position_embeddings=128_000,
            rope_theta=5e5,
        ),
        "gemma3_text": _sizes("Gemma3ForCausalLM", "gemma3_text", 2304, 9216, 26, 8, 4, 262_208),
        "cohere2": _sizes("Cohere2ForCausalLM", "cohere2", 8192, 22_528, 40, 64, 64, 256_000),
        "granite": _sizes("GraniteForCausalLM", "granite", 4096, 11_008, 32, 32, 32, 32_000),
    }
)
"""Architecture and defaults of the text models, by `model_type`."""

_SHARED = (
    "bos_token_id",
    "compression_config",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "quantization",
    "quantization_config",
    "torch_dtype",
)
"""Fields of the whole model that hold for its text model, too."""
_TIE = "tie_word_embeddings"
_SECTIONS = ("text_config", "vision_config", "audio_config", "vision_feature_layer")


@frozen(eq=False)
class TextPart:
    """A multimodal model's text model."""

    whole: str
    """The architecture of the whole model."""
    config: Mapping[str, Any]
    """The `config.json` of a text model."""
    is_tie_stated: bool


def text_part(config: Mapping[str, Any]) -> TextPart | None:
    """The text model of a multimodal model; None for other models. Raises FormatError.

    A multimodal model that is not in the tables gives None, too: its architecture is unknown.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in WHOLE_MODELS:
        return None
    own = config.get("text_config")
    if own is None and isinstance(config.get("vision_config"), dict):
        own = {key: value for key, value in config.items() if key not in ("model_type", *_SECTIONS)}
    if not isinstance(own, dict):
        raise FormatError(f"config.json: text_config must be an object, found {shown(own)}")
    text_kind = own.get("model_type") or WHOLE_MODELS[kind]
    if not isinstance(text_kind, str) or text_kind not in TEXT_MODELS:
        # The family of the text model is looked up by this name, and refused by name.
        return TextPart(_whole(config, kind), {**own, "architectures": None}, False)

    defaults = TEXT_MODELS[text_kind]
    shared = {key: config[key] for key in _SHARED if key in config}
    ties = [values[_TIE] for values in (config, own) if isinstance(values.get(_TIE), bool)]
    text = {
        **defaults,
        **own,
        **shared,
        "architectures": defaults["architectures"],
        "model_type": defaults["model_type"],
        _TIE: any(ties) if ties else True,
    }
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            text[key] = _without_sections(text[key])
    return TextPart(_whole(config, kind), text, bool(ties))


def _whole(config: Mapping[str, Any], kind: str) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else kind


def _without_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rope whose sections count time, height and width, which are equal for text."""
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value
        for key, value in rope.items()
    }
