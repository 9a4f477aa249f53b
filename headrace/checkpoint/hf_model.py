"""What a Hugging Face folder says of its model: `config.json` to `ModelSpec`, with transformers' meaning and defaults.

Repository code (`auto_map`) is never looked at: a known architecture is computed by our own equations.
"""

import math
from pathlib import Path
from typing import Any, Literal

from headrace.checkpoint.compressed_tensors import check_quantisation
from headrace.checkpoint.files import member, read_json
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model.spec import ModelSpec, RopeSpec

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}

# Defaults of transformers' config classes where the families differ. None: as many as there are heads.
_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32}
_MAX_CONTEXT = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768}

# Fields that change the numbers in ways we do not compute, and the values that leave them alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "hidden_act": (None, "silu"),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "use_qk_norm": (None, False),
}

_ROPE_FIELDS = {
    *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned"),
}


class _Fields:
    """A JSON object whose fields are read with their types; a null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str, kind: type | tuple[type, ...], default: Any, what: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise FormatError(f"{self.where}: {key} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FormatError(f"{self.where}: {key} must be {what}, found {str(value)[:40]}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise FormatError(f"{self.where}: {key} is out of range")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, (int, float), default, "a number")
        if not math.isfinite(value) or abs(value) > 1e30:
            raise FormatError(f"{self.where}: {key} is {value}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self.get(key, bool, default, "true or false")
        return value


def hf_spec(folder: Path) -> ModelSpec:
    """Read the specification. Raises UnsupportedModelError naming the field, FormatError for a missing or malformed one."""
    values = read_json(member(folder, "config.json"))
    config = _Fields(values, "config.json")
    architecture = _architecture(values)
    for key, neutral in _NEUTRAL.items():
        if values.get(key) not in neutral:
            raise UnsupportedModelError(f"config.json: {key} = {str(values[key])[:80]} is not supported")
    check_quantisation(values.get("quantization_config"))
    dim, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers")
    head_dim = config.integer("head_dim", dim // max(num_heads, 1))
    default_kv_heads = num_heads if "num_key_value_heads" in values else _KV_HEADS[architecture] or num_heads
    max_context = config.integer("max_position_embeddings", _MAX_CONTEXT[architecture])
    attention_bias = architecture == "llama" and config.flag("attention_bias", False)
    return ModelSpec(
        architecture=architecture,
        name=_name(folder),
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", default_kv_heads),
        head_dim=head_dim,
        ffn_dim=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_context=max_context,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, head_dim, max_context),
        windows=_windows(config, architecture, num_layers),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=architecture == "llama" and config.flag("mlp_bias", False),
    )


def chat_template(folder: Path) -> str | None:
    """The default chat template: `chat_template.jinja`, else the one in `tokenizer_config.json`."""
    if (folder / "chat_template.jinja").exists():
        path = member(folder, "chat_template.jinja")
        try:
            return path.read_text("utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise FormatError(f"chat_template.jinja: {error}") from error
    if not (folder / "tokenizer_config.json").exists():
        return None
    template = read_json(member(folder, "tokenizer_config.json")).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise FormatError("tokenizer_config.json: chat_template must be a string or a list of named ones")
    return template


def _architecture(values: dict[str, Any]) -> str:
    named = values.get("architectures")
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        name, architecture = named[0], ARCHITECTURES.get(named[0])
    else:
        name = str(values.get("model_type"))
        architecture = name if name in ARCHITECTURES.values() else None
    if architecture is None:
        raise UnsupportedModelError(f"config.json: unknown architecture {name[:80]!r}; known: {', '.join(ARCHITECTURES)}")
    return architecture


def _name(folder: Path) -> str:
    """The folder's name; for the Hugging Face cache (`models--ORG--NAME/snapshots/REVISION`) that of the repository."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def _windows(config: _Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    slides = {
        "llama": False,
        "mistral": config.values.get("sliding_window", 4096) is not None,
        "qwen2": config.flag("use_sliding_window", False),
    }
    window = config.integer("sliding_window", 4096) if slides[architecture] else 0
    first = config.integer("max_window_layers", 28) if architecture == "qwen2" else 0
    num_layers = min(num_layers, 1 << 16)  # an absurd count is refused later, with the other sizes
    kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
    given = config.values.get("layer_types") or kinds
    if given != kinds:
        per_layer = architecture == "qwen2" and isinstance(given, list) and len(given) == num_layers
        if not per_layer or not all(kind == "full_attention" or (kind == "sliding_attention" and window) for kind in given):
            raise UnsupportedModelError(f"config.json: layer_types = {str(given)[:80]} is not supported with sliding_window = {window}")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in given)
    return windows if any(windows) else ()


def _rope(config: _Fields, head_dim: int, max_context: int) -> RopeSpec:
    """From `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values = config.get(key, dict, {}, "an object")
    rope = _Fields(values, f"config.json: {key}")
    for field in values:
        if field not in _ROPE_FIELDS:
            raise UnsupportedModelError(f"config.json: {key}.{field[:80]} is not supported")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"config.json: {key}.partial_rotary_factor is not supported")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return RopeSpec(head_dim, theta)
    if kind == "linear":
        return RopeSpec(head_dim, theta, "linear", rope.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise UnsupportedModelError(f"config.json: {key}.rope_type = {str(kind)[:80]} is not supported")
    # A field of this name beside the object takes precedence, as in transformers.
    original = config.integer("original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_context))
    return _llama3(rope, head_dim, theta, original) if kind == "llama3" else _yarn(rope, head_dim, theta, original, max_context)


def _llama3(rope: _Fields, head_dim: int, theta: float, original: int) -> RopeSpec:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    return RopeSpec(head_dim, theta, "llama3", rope.number("factor"), original, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: _Fields, head_dim: int, theta: float, original: int, max_context: int) -> RopeSpec:
    def optional(key: Literal["attention_factor", "mscale", "mscale_all_dim"]) -> float | None:
        return None if rope.values.get(key) is None else rope.number(key)

    return RopeSpec(
        head_dim,
        theta,
        "yarn",
        rope.number("factor", max_context / max(original, 1)),
        original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )
