"""Common GGUF metadata (keys as in ggml, `docs/gguf.md`)."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.errors import FormatError, UnsupportedModelError
from headrace.model.family import Tensors
from headrace.model.fields import Fields
from headrace.model.rope import yarn_temperature
from headrace.model.sources import stacked, weights
from headrace.model.spec import ExpertSpec, ModelSpec, RopeSpec, layer_range
from headrace.quant.formats import StoredTensor

_ROPE_FACTORS = "rope_freqs.weight"
_MAX_ROPE_FACTORS = 1 << 16

TENSORS = weights(
    {
        "embed": "token_embd",
        "embed_norm": "token_embd_norm",
        "positions": "position_embd",
        "head": "output",
        "norm": "output_norm",
    },
    "blk.{}",
    {
        "attn_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "sinks": "attn_sinks",
        "attn_post_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp_post_norm": "post_ffw_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "router": "ffn_gate_inp",
        "shared_router": "ffn_gate_inp_shexp",
        "shared_gate": "ffn_gate_shexp",
        "shared_up": "ffn_up_shexp",
        "shared_down": "ffn_down_shexp",
    },
)

EXPERTS = {
    name: source
    for part in ("gate", "up", "down")
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
    for name, source in stacked(f"{part}{suffix}", f"blk.{{}}.ffn_{part}_exps.{kind}").items()
}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window_pattern": (0, 1),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.dimension_sections": (),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "use_parallel_residual": (False,),
}
"""Values that a plain decoder computes; others are refused."""


def decoder_spec(
    fields: Fields,
    tensors: Tensors,
    architecture: str,
    *,
    head_dim: int | None = None,
    computed: Collection[str] = (),
) -> ModelSpec:
    """The specification of a plain decoder, with keys of `architecture`.

    Existing tensors decide about biases, gates and tied embeddings. A family reads the `computed`
    keys itself.

    Raises UnsupportedModelError for a key that changes the numbers and is not computed, and
    FormatError for a missing or malformed key.
    """
    neutral = {
        f"{architecture}.{key}": values for key, values in NEUTRAL.items() if key not in computed
    }
    fields.require_neutral(neutral)
    dim = fields.integer(f"{architecture}.embedding_length")
    num_layers = _num_layers(fields, tensors, architecture)
    num_heads = _same_in_every_layer(fields, f"{architecture}.attention.head_count")
    if head_dim is None:
        head_dim = fields.integer(f"{architecture}.attention.key_length", dim // max(num_heads, 1))
        if fields.integer(f"{architecture}.attention.value_length", head_dim) != head_dim:
            raise fields.unsupported(
                f"{architecture}.attention.value_length", ": it differs from key_length"
            )
    window = fields.integer(f"{architecture}.attention.sliding_window", 0)
    embedding = tensors.get("token_embd.weight") or tensors.get("output.weight")
    rope = rope_spec(fields, tensors, architecture, head_dim)
    is_rms = f"{architecture}.attention.layer_norm_epsilon" not in fields
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=_same_in_every_layer(
            fields, f"{architecture}.attention.head_count_kv", num_heads
        ),
        head_dim=head_dim,
        ffn_dim=_same_in_every_layer(fields, f"{architecture}.feed_forward_length"),
        # Without an embedding, the check of the tensors refuses the file later.
        vocab_size=embedding.rows if embedding else 1,
        max_context=_max_context(fields, architecture, rope),
        norm_eps=fields.number(
            f"{architecture}.attention.layer_norm_{'rms_' if is_rms else ''}epsilon"
        ),
        norm="rms" if is_rms else "layer",
        norm_bias="output_norm.bias" in tensors,
        rope=rope,
        windows=(window,) * len(layer_range(num_layers)) if window else (),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias=any(f"blk.0.attn_{name}.bias" in tensors for name in ("q", "k", "v", "qkv")),
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias=any(f"blk.0.ffn_{name}.bias" in tensors for name in ("gate", "up", "down")),
        head_bias="output.bias" in tensors,
        gated_mlp=any(".ffn_gate" in name and "_inp" not in name for name in tensors),
    )


def _num_layers(fields: Fields, tensors: Tensors, architecture: str) -> int:
    """The number of the model's layers. Files count layers for drafts, which come last, too: also
    some files without their tensors.
    """
    blocks = fields.integer(f"{architecture}.block_count")
    first = blocks - fields.integer(f"{architecture}.nextn_predict_layers", 0)
    is_own = f"blk.{first}.attn_norm.weight" in tensors
    is_for_drafts = f"blk.{first}.nextn.eh_proj.weight" in tensors
    return blocks if is_own and not is_for_drafts else first


def expert_spec(fields: Fields, tensors: Tensors, architecture: str, spec: ModelSpec) -> ExpertSpec:
    return ExpertSpec(
        num_experts=fields.integer(f"{architecture}.expert_count"),
        top_k=fields.integer(f"{architecture}.expert_used_count"),
        ffn_dim=fields.integer(f"{architecture}.expert_feed_forward_length", spec.ffn_dim),
        dense_layers=tuple(
            layer
            for layer in layer_range(spec.num_layers)
            if f"blk.{layer}.ffn_gate_inp.weight" not in tensors
        ),
    )


def _factors(fields: Fields, stored: StoredTensor) -> tuple[float, ...]:
    if stored.rows * stored.cols > _MAX_ROPE_FACTORS:
        raise FormatError(
            f"{fields.where}: tensor {stored.name} has shape {list(stored.shape)}; "
            f"at most {_MAX_ROPE_FACTORS:,} factors are supported"
        )
    return tuple(stored.dequantise().reshape(-1).tolist())


def _same_in_every_layer(fields: Fields, key: str, default: int | None = None) -> int:
    """An integer of all layers. Raises UnsupportedModelError if layers differ."""
    if not isinstance(values := fields.get(key), np.ndarray):
        return fields.integer(key, default)
    if values.dtype.kind not in "iu" or not len(values):
        raise FormatError(f"{fields.where}: {key} must be an integer or an array of integers")
    if (values != values[0]).any():
        raise UnsupportedModelError(f"{fields.where}: {key} differs between layers")
    return int(values[0])


def _max_context(fields: Fields, architecture: str, rope: RopeSpec) -> int:
    """The max length. Converters state it before or after the rotary rule stretches it."""
    context = fields.integer(f"{architecture}.context_length")
    return max(context, round(_original_context(fields, architecture) * rope.factor))


def _original_context(fields: Fields, architecture: str) -> int:
    return fields.integer(f"{architecture}.rope.scaling.original_context_length", 0)


def rope_spec(fields: Fields, tensors: Tensors, architecture: str, head_dim: int) -> RopeSpec:
    """The rotary embedding, with the arithmetic of llama.cpp."""
    prefix = f"{architecture}.rope"
    plain = RopeSpec(
        fields.integer(f"{prefix}.dimension_count", head_dim),
        fields.number(f"{prefix}.freq_base", 10000.0),
    )
    # Older converters wrote only the linear factor, under another key.
    factor = (
        fields.number(f"{prefix}.scaling.factor", 0.0)
        or fields.number(f"{prefix}.scale_linear", 0.0)
        or 1.0
    )
    scaling = fields.string(f"{prefix}.scaling.type", "linear" if factor != 1.0 else "none")
    attention_factor = fields.positive(f"{prefix}.scaling.attn_factor", 1.0)
    short, long = (tensors.get(f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short and long:
        # The factors of a pair take the place of a rule.
        return replace(
            plain,
            scaling="longrope",
            original_context=_original_context(fields, architecture)
            or fields.integer(f"{architecture}.context_length"),
            attention_factor=attention_factor,
            factors=_factors(fields, short),
            long_factors=_factors(fields, long),
        )
    stored = tensors.get(_ROPE_FACTORS)
    plain = replace(plain, factors=_factors(fields, stored) if stored else ())
    if scaling == "yarn":
        weight = fields.number(f"{prefix}.scaling.yarn_log_multiplier", 0.0)
        if weight < 0:
            raise fields.unsupported(f"{prefix}.scaling.yarn_log_multiplier")
        return replace(
            plain,
            scaling="yarn",
            factor=factor,
            original_context=_original_context(fields, architecture),
            beta_fast=fields.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention_factor
            * yarn_temperature(factor)
            / yarn_temperature(factor, weight),
        )
    if scaling not in ("linear", "none"):
        reason = ": the tensors rope_factors_long and rope_factors_short are missing"
        raise fields.unsupported(f"{prefix}.scaling.type", reason if scaling == "longrope" else "")
    return replace(
        plain,
        scaling="linear" if scaling == "linear" else "none",
        factor=factor if scaling == "linear" else 1.0,
        attention_factor=None if attention_factor == 1.0 else attention_factor,
    )
