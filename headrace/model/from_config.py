"""What `config.json` of Hugging Face says alike of most families, with transformers' meaning and defaults.

Repository code (`auto_map`) is never looked at: a known family is computed by our own equations.
"""

from typing import Any

from headrace.errors import UnsupportedModelError
from headrace.model.fields import Fields
from headrace.model.spec import ModelSpec, RopeSpec

IGNORED = ("rotary_emb.inv_freq",)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "hidden_act": ("silu",),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "use_qk_norm": (False,),
}
"""Fields that change the numbers in ways that a plain decoder does not compute, and the values that leave them alone."""

_ROPE_FIELDS = {
    *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned"),
}


def decoder(config: Fields, architecture: str, *, max_context: int, kv_heads: int | None, windows: tuple[int, ...] = ()) -> ModelSpec:
    """The specification of a plain decoder without biases.

    `max_context` and `kv_heads` (None: as many as there are heads) are the family's defaults. Raises UnsupportedModelError naming the
    field, FormatError for a missing or malformed one.
    """
    config.require_neutral(NEUTRAL)
    dim, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", dim // max(num_heads, 1))
    # A null says "as many as there are heads"; only an absent field has the family's default.
    default_kv_heads = num_heads if "num_key_value_heads" in config or kv_heads is None else kv_heads
    context = config.integer("max_position_embeddings", max_context)
    return ModelSpec(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", default_kv_heads),
        head_dim=head_dim,
        ffn_dim=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_context=context,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope(config, head_dim, context),
        windows=windows,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def sliding_windows(config: Fields, window: int, first: int = 0, by_layer: bool = False) -> tuple[int, ...]:
    """The window of each layer: `window` from layer `first` on (0: none has one), or as `layer_types` says where it may (`by_layer`)."""
    num_layers = min(config.integer("num_hidden_layers"), 1 << 16)  # an absurd count is refused later, with the other sizes
    kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
    given = config.get("layer_types") or kinds
    if given != kinds:
        per_layer = by_layer and isinstance(given, list) and len(given) == num_layers
        if not per_layer or not all(kind == "full_attention" or (kind == "sliding_attention" and window) for kind in given):
            raise config.unsupported("layer_types", f" with sliding_window = {window}")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in given)
    return windows if any(windows) else ()


def rope(config: Fields, head_dim: int, max_context: int) -> RopeSpec:
    """The rotary embedding, from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.section(key)
    for field in values:
        if field not in _ROPE_FIELDS:
            raise UnsupportedModelError(f"{config.where}: {key}.{field[:80]} is not supported")
    if values.number("partial_rotary_factor", 1.0) != 1.0:
        raise values.unsupported("partial_rotary_factor")
    theta = values.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return RopeSpec(head_dim, theta)
    if kind == "linear":
        return RopeSpec(head_dim, theta, "linear", values.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise UnsupportedModelError(f"{config.where}: {key}.rope_type = {str(kind)[:80]} is not supported")
    # A field of this name beside the object takes precedence, as in transformers.
    original = config.integer("original_max_position_embeddings", values.integer("original_max_position_embeddings", max_context))
    return _llama3(values, head_dim, theta, original) if kind == "llama3" else _yarn(values, head_dim, theta, original, max_context)


def _llama3(values: Fields, head_dim: int, theta: float, original: int) -> RopeSpec:
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    return RopeSpec(head_dim, theta, "llama3", values.number("factor"), original, low_freq_factor=low, high_freq_factor=high)


def _yarn(values: Fields, head_dim: int, theta: float, original: int, max_context: int) -> RopeSpec:
    return RopeSpec(
        head_dim,
        theta,
        "yarn",
        values.number("factor", max_context / max(original, 1)),
        original,
        beta_fast=values.number("beta_fast", 32.0) or 32.0,
        beta_slow=values.number("beta_slow", 1.0) or 1.0,
        truncate=values.flag("truncate", True),
        attention_factor=values.optional_number("attention_factor"),
        mscale=values.optional_number("mscale"),
        mscale_all_dim=values.optional_number("mscale_all_dim"),
    )
