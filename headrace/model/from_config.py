"""Common fields of a Hugging Face `config.json`, with the meaning and defaults of transformers."""

from collections.abc import Collection, Mapping
from typing import Any

from headrace.errors import UnsupportedModelError
from headrace.model.fields import Fields, shown
from headrace.model.rope import stretched_context
from headrace.model.sources import weights
from headrace.model.spec import ModelSpec, RopeSpec, layer_range
from headrace.program.ops import Activation

TENSORS = weights(
    {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"},
    "model.layers.{}",
    {
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "hidden_act": ("silu",),
    "is_causal": (True,),
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
"""Values that a plain decoder computes; others are refused."""

_ROPE_FIELDS = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "finetuned",
    "short_factor",
    "long_factor",
    # The three positions of a text token are equal, so multimodal sections change nothing.
    "mrope_section",
    "mrope_interleaved",
}
_PLAIN_ROPE = (None, "default", "none", "mrope")
_KINDS_OF_LAYER = ("full_attention", "sliding_attention")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def decoder_spec(
    config: Fields,
    architecture: str,
    *,
    max_context: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    windows: tuple[int, ...] = (),
    eps_field: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    tied: bool = False,
    theta: float = 10000.0,
    partial: float | None = None,
    rope: RopeSpec | None = None,
    computed: Collection[str] = (),
) -> ModelSpec:
    """The specification of a plain decoder without biases.

    Keyword arguments are defaults. A family may pass its own rotary embedding as `rope`, and
    further fields that it reads as `computed`.

    Raises UnsupportedModelError for a field that changes the numbers and is not computed, and
    FormatError for a missing or malformed field.
    """
    config.require_neutral({key: values for key, values in NEUTRAL.items() if key not in computed})
    dim, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", head_dim or dim // max(num_heads, 1))
    # Null means the number of heads; only a missing field means the family's default.
    if "num_key_value_heads" in config or kv_heads is None:
        kv_heads = num_heads
    context = config.integer("max_position_embeddings", max_context)
    window_rope = None
    if rope is None:
        full, sliding = (
            rope_spec(config, head_dim, context, theta=theta, partial=partial, kind_of_layer=kind)
            for kind in _KINDS_OF_LAYER
        )
        rope, window_rope = full, (sliding if sliding != full else None)
        if full.dim != sliding.dim:
            raise config.unsupported("rope_parameters", ": layers rotate different numbers")
    return ModelSpec(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        ffn_dim=config.integer("intermediate_size", 4 * dim),
        vocab_size=config.integer("vocab_size"),
        max_context=stretched_context(rope, context),
        norm_eps=config.number(eps_field, default_eps),
        rope=rope,
        window_rope=window_rope,
        windows=windows,
        tied_embeddings=config.flag("tie_word_embeddings", tied),
    )


def activation(config: Fields, key: str, default: str) -> Activation:
    """Raises UnsupportedModelError for an unknown activation."""
    name = config.string(key, default)
    if name not in _ACTIVATIONS:
        raise config.unsupported(key)
    return _ACTIVATIONS[name]


def layer_windows(config: Fields, window: int, period: int) -> tuple[int, ...]:
    """The window of each layer, by `layer_types` or except every `period`-th layer."""
    layers = layer_range(config.integer("num_hidden_layers"))
    default = [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in layers
    ]
    kinds = config.get("layer_types") or default
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(layers)
        or not {*map(str, kinds)} <= {"sliding_attention", "full_attention"}
    ):
        raise config.unsupported("layer_types")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def sliding_windows(
    config: Fields, window: int, first: int = 0, by_layer: bool = False
) -> tuple[int, ...]:
    """`window` from layer `first` on, or by `layer_types`."""
    layers = layer_range(config.integer("num_hidden_layers"))
    default = [
        "sliding_attention" if window and layer >= first else "full_attention" for layer in layers
    ]
    kinds = config.get("layer_types") or default
    if kinds != default:
        can_choose = by_layer and isinstance(kinds, list) and len(kinds) == len(layers)
        if not can_choose or not all(
            kind == "full_attention" or (kind == "sliding_attention" and window) for kind in kinds
        ):
            raise config.unsupported("layer_types", f" with sliding_window = {window}")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def rope_spec(
    config: Fields,
    head_dim: int,
    max_context: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    kind_of_layer: str = "",
) -> RopeSpec:
    """The rotary embedding, from `rope_parameters` (transformers 5) or `rope_scaling` (before).

    A file may have a section for each kind of layer; `kind_of_layer` chooses one. If a model card
    adds `rope_scaling` to `rope_parameters`, the base stays the base of the file.
    """
    stored = _of_layers(config, "rope_parameters", kind_of_layer)
    own_section = stored.where.endswith(": sliding_attention")
    key = "rope_scaling" if config.get("rope_scaling") and not own_section else "rope_parameters"
    values = _of_layers(config, key, kind_of_layer)
    for field in values:
        if field not in _ROPE_FIELDS:
            raise UnsupportedModelError(f"{values.where}.{field[:80]} is not supported")

    share = values.number(
        "partial_rotary_factor",
        stored.number(
            "partial_rotary_factor", config.number("partial_rotary_factor", partial or 1.0)
        ),
    )
    if share != 1 and partial is None:
        raise UnsupportedModelError(
            f"{config.where}: partial_rotary_factor = {share:g} is not supported for this family"
        )
    dim = int(head_dim * share) if share != 1 else head_dim
    theta = values.number(
        "rope_theta", stored.number("rope_theta", config.number("rope_theta", theta))
    )
    kind = values.get("rope_type") or values.get("type")
    # A field of this name outside the section takes precedence, as in transformers.
    original = config.integer(
        "original_max_position_embeddings",
        values.integer("original_max_position_embeddings", max_context),
    )

    if kind in _PLAIN_ROPE:
        return RopeSpec(dim, theta)
    match kind:
        case "linear":
            return RopeSpec(dim, theta, scaling="linear", factor=values.positive("factor"))
        case "dynamic":
            return RopeSpec(
                dim,
                theta,
                scaling="dynamic",
                factor=values.positive("factor"),
                original_context=max_context,
            )
        case "llama3":
            return RopeSpec(
                dim,
                theta,
                scaling="llama3",
                low_freq_factor=values.number("low_freq_factor"),
                high_freq_factor=values.number("high_freq_factor"),
                factor=values.positive("factor"),
                original_context=original,
            )
        case "yarn":
            return _yarn(values, dim, theta, original, max_context)
        case "longrope" | "su":
            return RopeSpec(
                dim,
                theta,
                scaling="longrope",
                factor=values.number("factor", max_context / max(original, 1)),
                original_context=original,
                attention_factor=values.optional_number("attention_factor"),
                factors=values.number_list("short_factor"),
                long_factors=values.number_list("long_factor"),
            )
    raise UnsupportedModelError(f"{values.where}.rope_type = {shown(kind)} is not supported")


def _of_layers(config: Fields, key: str, kind_of_layer: str) -> Fields:
    """The section `key`, or its section of a kind of layer if it has such sections."""
    values = config.section(key)
    kinds = [name for name, value in values.items() if isinstance(value, Mapping)]
    for name in kinds:
        if name not in _KINDS_OF_LAYER:
            raise UnsupportedModelError(f"{values.where}.{name[:80]} is not supported")
    if not kinds:
        return values
    return values.section(kind_of_layer if kind_of_layer in kinds else kinds[0])


def _yarn(values: Fields, dim: int, theta: float, original: int, max_context: int) -> RopeSpec:
    return RopeSpec(
        dim,
        theta,
        scaling="yarn",
        factor=values.positive("factor", max_context / max(original, 1)),
        original_context=original,
        beta_fast=values.number("beta_fast", 32.0) or 32.0,
        beta_slow=values.number("beta_slow", 1.0) or 1.0,
        truncate=values.flag("truncate", True),
        attention_factor=values.optional_number("attention_factor"),
        mscale=values.optional_number("mscale"),
        mscale_all_dim=values.optional_number("mscale_all_dim"),
    )
