"""What the metadata of a GGUF file says alike of most families (keys as in ggml, `docs/gguf.md`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.errors import FormatError, UnsupportedModelError
from headrace.model.fields import Fields
from headrace.model.rope import yarn_temperature
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.quant.formats import StoredTensor

_ROPE_FACTORS = "rope_freqs.weight"
_MAX_ROPE_FACTORS = 1 << 16
IGNORED = (_ROPE_FACTORS, "attn_rot_embd.weight")

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
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.dimension_sections": (),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
"""Keys that change the numbers in ways that a plain decoder does not compute, and the values that leave them alone."""


def decoder(fields: Fields, tensors: Mapping[str, StoredTensor], architecture: str) -> ModelSpec:
    """The specification of a plain decoder, whose keys begin with `architecture`; it has the biases that are there.

    Raises UnsupportedModelError naming the key, FormatError for a missing or malformed one.
    """
    fields.require_neutral({f"{architecture}.{key}": values for key, values in NEUTRAL.items()})
    dim = fields.integer(f"{architecture}.embedding_length")
    num_layers = fields.integer(f"{architecture}.block_count")
    num_heads = _same_in_every_layer(fields, f"{architecture}.attention.head_count")
    head_dim = fields.integer(f"{architecture}.attention.key_length", dim // max(num_heads, 1))
    if fields.integer(f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise fields.unsupported(f"{architecture}.attention.value_length", ": it differs from key_length")
    window = fields.integer(f"{architecture}.attention.sliding_window", 0)
    embedding = tensors.get("token_embd.weight")
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=_same_in_every_layer(fields, f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_dim=_same_in_every_layer(fields, f"{architecture}.feed_forward_length"),
        vocab_size=embedding.rows if embedding else 1,  # without an embedding the file is refused later, by that name
        max_context=fields.integer(f"{architecture}.context_length"),
        norm_eps=fields.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope=rope(fields, tensors, architecture, head_dim),
        windows=(window,) * min(num_layers, 1 << 16) if window else (),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias=any(f"blk.0.attn_{name}.bias" in tensors for name in "qkv"),
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias=any(f"blk.0.ffn_{name}.bias" in tensors for name in ("gate", "up", "down")),
    )


def _same_in_every_layer(fields: Fields, key: str, default: int | None = None) -> int:
    """An integer that some files give for each layer; models whose layers differ are not supported."""
    if not isinstance(values := fields.get(key), np.ndarray):
        return fields.integer(key, default)
    if values.dtype.kind not in "iu" or not len(values):
        raise FormatError(f"{fields.where}: {key} must be an integer or an array of them")
    if (values != values[0]).any():
        raise UnsupportedModelError(f"{fields.where}: {key} differs between layers")
    return int(values[0])


def rope(fields: Fields, tensors: Mapping[str, StoredTensor], architecture: str, head_dim: int) -> RopeSpec:
    """The rotary embedding, with the factors of its own that a file may have."""
    prefix = f"{architecture}.rope"
    dim = fields.integer(f"{prefix}.dimension_count", head_dim)
    theta = fields.number(f"{prefix}.freq_base", 10000.0)
    # Older converters wrote the linear factor alone, under its own key.
    factor = fields.number(f"{prefix}.scaling.factor", 0.0) or fields.number(f"{prefix}.scale_linear", 0.0) or 1.0
    scaling = fields.string(f"{prefix}.scaling.type", "linear" if factor != 1.0 else "none")
    stretch = fields.number(f"{prefix}.scaling.attn_factor", 1.0)
    factors: tuple[float, ...] = ()
    if stored := tensors.get(_ROPE_FACTORS):
        if stored.rows * stored.cols > _MAX_ROPE_FACTORS:
            raise FormatError(f"{fields.where}: tensor {_ROPE_FACTORS} has shape {list(stored.shape)}: too many factors")
        factors = tuple(stored.dequantise().reshape(-1).tolist())
    if scaling == "yarn":
        return RopeSpec(
            dim,
            theta,
            "yarn",
            factor,
            original_context=fields.integer(f"{prefix}.scaling.original_context_length", 0),
            beta_fast=fields.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
            attention_factor=stretch * yarn_temperature(factor),
            factors=factors,
        )
    if stretch != 1.0:
        raise fields.unsupported(f"{prefix}.scaling.attn_factor", " without yarn")
    if scaling == "linear":
        return RopeSpec(dim, theta, "linear", factor, factors=factors)
    if scaling == "none":
        return RopeSpec(dim, theta, factors=factors)
    raise fields.unsupported(f"{prefix}.scaling.type")
