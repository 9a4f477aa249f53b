"""What a GGUF file says of its model: metadata to `ModelSpec` (keys as in ggml, `docs/gguf.md`)."""

from typing import Any

import numpy as np

from headrace.checkpoint.gguf import GgufFile, Metadata
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model.rope import yarn_temperature
from headrace.model.spec import ModelSpec, RopeSpec

ARCHITECTURES = ("llama", "qwen2")
HALF_SPLIT_ROPE = ("qwen2",)
"""Architectures whose query and key rows are stored half-split; converters permute those of `llama` to interleaved."""
ROPE_FACTORS = "rope_freqs.weight"

# Keys that change the numbers in ways we do not compute, and the values that leave them alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
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


def gguf_spec(file: GgufFile) -> ModelSpec:
    """Read the specification. Raises UnsupportedModelError naming the key, FormatError for a missing or malformed one."""
    metadata = file.metadata
    architecture = metadata.string("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(f"{file.path.name}: unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    _refuse_features(metadata, architecture)
    dim = metadata.integer(f"{architecture}.embedding_length")
    num_layers = metadata.integer(f"{architecture}.block_count")
    num_heads = _same_in_every_layer(metadata, f"{architecture}.attention.head_count")
    head_dim = metadata.integer(f"{architecture}.attention.key_length", dim // max(num_heads, 1))
    if metadata.integer(f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path.name}: {architecture}.attention.value_length differs from key_length")
    window = metadata.integer(f"{architecture}.attention.sliding_window", 0)
    if window and architecture != "llama":
        raise UnsupportedModelError(f"{file.path.name}: {architecture}.attention.sliding_window does not say which layers it is for")
    embedding = file.tensors.get("token_embd.weight")
    return ModelSpec(
        architecture=architecture,
        name=metadata.string("general.name", file.path.stem),
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=_same_in_every_layer(metadata, f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_dim=_same_in_every_layer(metadata, f"{architecture}.feed_forward_length"),
        vocab_size=embedding.rows if embedding else 1,  # without an embedding the file is refused later, by that name
        max_context=metadata.integer(f"{architecture}.context_length"),
        norm_eps=metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope=_rope(file, architecture, head_dim),
        windows=(window,) * min(num_layers, 1 << 16) if window else (),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias=any(f"blk.0.attn_{name}.bias" in file.tensors for name in "qkv"),
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias=any(f"blk.0.ffn_{name}.bias" in file.tensors for name in ("gate", "up", "down")),
    )


def _refuse_features(metadata: Metadata, architecture: str) -> None:
    if metadata.integer("split.count", 1) > 1:
        raise UnsupportedModelError(f"{metadata.file_name}: split.count: one part of a split model; merge the parts first")
    for key, neutral in _NEUTRAL.items():
        key = f"{architecture}.{key}"
        if key in metadata and (isinstance(value := metadata[key], np.ndarray) or value not in neutral):
            raise UnsupportedModelError(f"{metadata.file_name}: {key} is not supported")


def _same_in_every_layer(metadata: Metadata, key: str, default: int | None = None) -> int:
    """An integer that some files give for each layer; models whose layers differ are not supported."""
    if key not in metadata or not isinstance(values := metadata[key], np.ndarray):
        return metadata.integer(key, default)
    if values.dtype.kind not in "iu" or not len(values):
        raise FormatError(f"{metadata.file_name}: {key} must be an integer or an array of them")
    if (values != values[0]).any():
        raise UnsupportedModelError(f"{metadata.file_name}: {key} differs between layers")
    return int(values[0])


def _rope(file: GgufFile, architecture: str, head_dim: int) -> RopeSpec:
    metadata, prefix = file.metadata, f"{architecture}.rope"
    dim = metadata.integer(f"{prefix}.dimension_count", head_dim)
    theta = metadata.number(f"{prefix}.freq_base", 10000.0)
    # Older converters wrote the linear factor alone, under its own key.
    factor = metadata.number(f"{prefix}.scaling.factor", 0.0) or metadata.number(f"{prefix}.scale_linear", 0.0) or 1.0
    scaling = metadata.string(f"{prefix}.scaling.type", "linear" if factor != 1.0 else "none")
    stretch = metadata.number(f"{prefix}.scaling.attn_factor", 1.0)
    factors: tuple[float, ...] = ()
    if ROPE_FACTORS in file.tensors:
        factors = tuple(file.tensors[ROPE_FACTORS].dequantise().reshape(-1).tolist())
    if scaling == "yarn":
        return RopeSpec(
            dim,
            theta,
            "yarn",
            factor,
            original_context=metadata.integer(f"{prefix}.scaling.original_context_length", 0),
            beta_fast=metadata.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
            beta_slow=metadata.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
            attention_factor=stretch * yarn_temperature(factor),
            factors=factors,
        )
    if stretch != 1.0:
        raise UnsupportedModelError(f"{metadata.file_name}: {prefix}.scaling.attn_factor without yarn is not supported")
    if scaling == "linear":
        return RopeSpec(dim, theta, "linear", factor, factors=factors)
    if scaling == "none":
        return RopeSpec(dim, theta, factors=factors)
    raise UnsupportedModelError(f"{metadata.file_name}: {prefix}.scaling.type {scaling!r} is not supported")
