"""What `config.json` of Hugging Face says alike of most families, with transformers' meaning and
defaults.

Repository code (`auto_map`) is never looked at: a known family is computed by our own equations.
"""

from collections.abc import Collection
from typing import Any

from headrace.errors import UnsupportedModelError
from headrace.model.fields import Fields
from headrace.model.places import weights
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.program.ops import Activation

TENSORS = weights(
    {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"},
    "model.layers.{}",
    {
        "attn_norm": "input_layernorm",
        **{name: f"self_attn.{name}_proj" for name in "qkvo"},
        **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
        "mlp_norm": "post_attention_layernorm",
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    },
)
"""Tensors by the names that Llama has, and most families after it."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "hidden_act": ("silu",),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
}
"""Fields that change the numbers in ways that a plain decoder does not compute, and the values that
leave them alone.
"""

_ROPE_FIELDS = {
    *(
        "rope_theta",
        "rope_type",
        "type",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    *(
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "partial_rotary_factor",
        "finetuned",
    ),
    *("short_factor", "long_factor"),
}

_ACTIVATIONS: dict[str, Activation] = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"},
    **{"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
}


def decoder(
    config: Fields,
    architecture: str,
    *,
    max_context: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    windows: tuple[int, ...] = (),
    eps: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    tied: bool = False,
    theta: float = 10000.0,
    partial: float | None = None,
    rotary: RopeSpec | None = None,
    computed: Collection[str] = (),
) -> ModelSpec:
    """The specification of a plain decoder without biases.

    The family's defaults are `max_context`, `kv_heads` and `head_dim` (None: what follows from the
    heads and the width), the epsilon of norms and its name, whether embeddings are `tied`, the
    rotary base `theta` and the `partial` rotary factor (None: there is none). A family that reads
    its rotary embedding in a way of its own gives it as `rotary`, and fields in `computed` are its
    own affair. Raises UnsupportedModelError naming the field, FormatError for a missing or
    malformed one.
    """
    config.require_neutral({key: values for key, values in NEUTRAL.items() if key not in computed})
    dim, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", head_dim or dim // max(num_heads, 1))
    # A null says "as many as there are heads"; only an absent field has the family's default.
    default_kv_heads = (
        num_heads if "num_key_value_heads" in config or kv_heads is None else kv_heads
    )
    context = config.integer("max_position_embeddings", max_context)
    rotary = rotary or rope(config, head_dim, context, theta=theta, partial=partial)
    return ModelSpec(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", default_kv_heads),
        head_dim=head_dim,
        ffn_dim=config.integer("intermediate_size", 4 * dim),
        vocab_size=config.integer("vocab_size"),
        max_context=int(context * rotary.factor) if rotary.scaling == "dynamic" else context,
        norm_eps=config.number(eps, default_eps),
        rope=rotary,
        windows=windows,
        tied_embeddings=config.flag("tie_word_embeddings", tied),
    )


def activation(config: Fields, key: str, default: str) -> Activation:
    """The activation that a field names. Raises UnsupportedModelError for one that we do not
    have.
    """
    if (name := config.string(key, default)) not in _ACTIVATIONS:
        raise config.unsupported(key)
    return _ACTIVATIONS[name]


def layer_windows(config: Fields, window: int, period: int) -> tuple[int, ...]:
    """The window of each layer as `layer_types` says; where it is missing, each layer has one but
    the last of every `period`.
    """
    num_layers = min(config.integer("num_hidden_layers"), 1 << 16)
    kinds = [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(num_layers)
    ]
    given = config.get("layer_types") or kinds
    if (
        not isinstance(given, list)
        or len(given) != num_layers
        or not {*map(str, given)} <= {"sliding_attention", "full_attention"}
    ):
        raise config.unsupported("layer_types")
    return tuple(window if kind == "sliding_attention" else 0 for kind in given)


def sliding_windows(
    config: Fields, window: int, first: int = 0, by_layer: bool = False
) -> tuple[int, ...]:
    """The window of each layer: `window` from layer `first` on (0: none has one), or as
    `layer_types` says where it may (`by_layer`).
    """
    num_layers = min(
        config.integer("num_hidden_layers"), 1 << 16
    )  # an absurd count is refused later, with the other sizes
    kinds = [
        "sliding_attention" if window and layer >= first else "full_attention"
        for layer in range(num_layers)
    ]
    given = config.get("layer_types") or kinds
    if given != kinds:
        per_layer = by_layer and isinstance(given, list) and len(given) == num_layers
        if not per_layer or not all(
            kind == "full_attention" or (kind == "sliding_attention" and window) for kind in given
        ):
            raise config.unsupported("layer_types", f" with sliding_window = {window}")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in given)
    return windows if any(windows) else ()


def rope(
    config: Fields,
    head_dim: int,
    max_context: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    kind_of_layer: str = "",
) -> RopeSpec:
    """The rotary embedding, from `rope_parameters` (transformers 5) or `rope_scaling` and
    `rope_theta` (before).

    `theta` and `partial` are defaults, and without the latter all of a head is rotated.
    `kind_of_layer` names the part of `rope_parameters` that has those of such layers.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.section(key)
    if kind_of_layer and kind_of_layer in values:
        values = values.section(kind_of_layer)
    for field in values:
        if field not in _ROPE_FIELDS:
            raise UnsupportedModelError(f"{values.where}: {key}.{field[:80]} is not supported")
    share = values.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", partial or 1.0)
    )
    if share != 1 and partial is None:
        raise values.unsupported("partial_rotary_factor")
    dim = int(head_dim * share) if share != 1 else head_dim
    theta = values.number("rope_theta", config.number("rope_theta", theta))
    kind = values.get("rope_type", values.get("type", "default"))
    # A field of this name beside the object takes precedence, as in transformers.
    original = config.integer(
        "original_max_position_embeddings",
        values.integer("original_max_position_embeddings", max_context),
    )
    match kind:
        case "default":
            return RopeSpec(dim, theta)
        case "linear":
            return RopeSpec(dim=dim, theta=theta, scaling="linear", factor=values.number("factor"))
        case "dynamic":
            return RopeSpec(
                dim=dim,
                theta=theta,
                scaling="dynamic",
                factor=values.number("factor"),
                original_context=max_context,
            )
        case "llama3":
            return _llama3(values, dim, theta, original)
        case "yarn":
            return _yarn(values, dim, theta, original, max_context)
        case "longrope" | "su":
            return _longrope(values, dim, theta, original, max_context)
    raise UnsupportedModelError(
        f"{values.where}: {key}.rope_type = {str(kind)[:80]} is not supported"
    )


def _llama3(values: Fields, head_dim: int, theta: float, original: int) -> RopeSpec:
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    return RopeSpec(
        dim=head_dim,
        theta=theta,
        scaling="llama3",
        factor=values.number("factor"),
        original_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(values: Fields, head_dim: int, theta: float, original: int, max_context: int) -> RopeSpec:
    return RopeSpec(
        dim=head_dim,
        theta=theta,
        scaling="yarn",
        factor=values.number("factor", max_context / max(original, 1)),
        original_context=original,
        beta_fast=values.number("beta_fast", 32.0) or 32.0,
        beta_slow=values.number("beta_slow", 1.0) or 1.0,
        truncate=values.flag("truncate", True),
        attention_factor=values.optional_number("attention_factor"),
        mscale=values.optional_number("mscale"),
        mscale_all_dim=values.optional_number("mscale_all_dim"),
    )


def _longrope(values: Fields, dim: int, theta: float, original: int, max_context: int) -> RopeSpec:
    factor = values.number("factor", max_context / max(original, 1))
    temperature = values.optional_number("attention_factor")
    short, long = values.number_list("short_factor"), values.number_list("long_factor")
    return RopeSpec(
        dim=dim,
        theta=theta,
        scaling="longrope",
        factor=factor,
        original_context=original,
        attention_factor=temperature,
        factors=short,
        long_factors=long,
    )
