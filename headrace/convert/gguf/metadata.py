"""A model that has no GGUF file yet, as one: the key-values of such files (ggml, `docs/gguf.md`),
from the specification of the model.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.disassemble import Stored
from headrace.convert.source_model import gguf_layout
from headrace.errors import HeadraceError, UnsupportedModelError
from headrace.model.fields import JsonFields
from headrace.model.rope import inverse_frequencies, yarn_temperature
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.record import frozen

_SHARED = {"name", "architecture", "rope", "window_rope"}
"""Fields of a specification that are compared by what they mean, or not at all: families share the
architectures of GGUF files.
"""
_PRECISION = 1e-6
"""Relative, of constants and rotary frequencies, which files have in float32."""


@frozen(eq=False)
class Described:
    """What a file says of a model."""

    values: Mapping[str, Any]
    """Key-values; integers are of 32 bits, and so are floats."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors, rows first; what belongs to experts or heads one by one has these first."""
    factors: Mapping[str, StoredTensor]
    """Of these tensors those that are rotary factors: they follow from the specification."""


def described(spec: ModelSpec, stored: Mapping[str, Stored]) -> Described:
    """The description of a model whose tensors are these, from which the same model is read.

    Raises UnsupportedModelError, which names what differs, where that is not so.
    """
    layout = gguf_layout(spec.architecture)
    name = layout.architectures[0]
    factors = _rope_factors(spec)
    shapes = {tensor: _shape(spec, parts) for tensor, parts in stored.items()} | {
        key: each.shape for key, each in factors.items()
    }
    keys = _usual(spec) | _rope(spec) | _experts(spec) | _own(spec, name)
    values = {"general.architecture": name, "general.type": "model", "general.name": spec.name}
    values |= {f"{name}.{key}": value for key, value in keys.items()}
    there = {
        tensor: factors.get(tensor) or _nothing(tensor, shape) for tensor, shape in shapes.items()
    }
    try:
        found = layout.spec(JsonFields(values, "the GGUF file"), there)
    except HeadraceError as error:
        raise _refusal(spec, str(error)) from error
    if different := _different(spec, found):
        raise _refusal(spec, different)
    return Described(values, shapes, factors)


def _refusal(spec: ModelSpec, why: str) -> UnsupportedModelError:
    advice = "llama.cpp's convert_hf_to_gguf.py may know more of it"
    return UnsupportedModelError(
        f"this {spec.architecture} model cannot be described in a GGUF file ({why}): {advice}"
    )


def _usual(spec: ModelSpec) -> dict[str, Any]:
    """The keys that most families have."""
    keys: dict[str, Any] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_context,
        "embedding_length": spec.dim,
        "feed_forward_length": spec.ffn_dim,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        f"attention.layer_norm_{'rms_' if spec.norm == 'rms' else ''}epsilon": spec.norm_eps,
        "vocab_size": spec.vocab_size,
    }
    if spec.head_dim * spec.num_heads != spec.dim:
        keys |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    constants = {
        "attention.sliding_window": max(spec.windows, default=0),
        "attention.max_alibi_bias": spec.alibi_bias,
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
    }
    return keys | {key: value for key, value in constants.items() if value}


def _rope(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.rope
    if rope is None:
        return {}
    keys: dict[str, Any] = {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    if spec.window_rope:
        keys["rope.freq_base_swa"] = spec.window_rope.theta
    if rope.scaling in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": rope.factor}
    if rope.scaling in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope.original_context or spec.max_context
    if rope.scaling == "yarn":
        limits = {"yarn_beta_fast": (rope.beta_fast, 32.0), "yarn_beta_slow": (rope.beta_slow, 1.0)}
        keys |= {
            f"rope.scaling.{key}": value
            for key, (value, default) in limits.items()
            if value != default
        }
    if spec.mla and rope.scaling == "yarn" and rope.mscale_all_dim:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope.mscale_all_dim
    elif rope.scaling in ("yarn", "longrope"):
        usual = yarn_temperature(rope.factor) if rope.scaling == "yarn" else 1.0
        stretch = inverse_frequencies(rope, spec.max_context, spec.max_context)[1] / usual
        keys |= {"rope.scaling.attn_factor": stretch} if not math.isclose(stretch, 1.0) else {}
    return keys


def _rope_factors(spec: ModelSpec) -> dict[str, StoredTensor]:
    """The rotary factors that files have as tensors; those of llama3 are what its rule makes of the
    frequencies.
    """
    rope = spec.rope
    if rope and rope.scaling == "llama3":
        plain, stretched = (
            inverse_frequencies(each, spec.max_context, 0)[0]
            for each in (RopeSpec(rope.dim, rope.theta), rope)
        )
        found: dict[str, Any] = {"rope_freqs.weight": plain / stretched}
    elif rope and rope.scaling == "longrope":
        found = {
            "rope_factors_long.weight": rope.long_factors,
            "rope_factors_short.weight": rope.factors,
        }
    else:
        found = {}
    return {
        name: StoredTensor.from_floats(name, np.array(factors, np.float32))
        for name, factors in found.items()
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    experts = spec.experts
    if experts is None:
        return {}
    keys = {
        "expert_count": experts.num_experts,
        "expert_used_count": experts.top_k,
        "expert_feed_forward_length": experts.ffn_dim,
    }
    return keys | (
        {"expert_shared_feed_forward_length": experts.shared_ffn_dim} if experts.shared_gate else {}
    )


def _own(spec: ModelSpec, name: str) -> dict[str, Any]:
    """The keys that an architecture has of its own, or in place of the usual ones."""
    match name:
        case "granite":
            return {
                "embedding_scale": spec.embedding_scale,
                "attention.scale": spec.attention_scale,
                "residual_scale": spec.residual_scale,
                "logit_scale": 1 / spec.logit_scale,
            }
        case "command-r" | "cohere2":
            return {"logit_scale": spec.logit_scale}
        case "gptneox" | "stablelm":
            return {"use_parallel_residual": spec.block != "sequential"}
        case "deepseek2":
            return _latent(spec)
    return {}


def _latent(spec: ModelSpec) -> dict[str, Any]:
    """Attention by latent rows is described in its absorbed form: one KV head."""
    latent, rope, experts = spec.mla, spec.rope, spec.experts
    assert latent and rope
    keys: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent.kv_rank,
        "attention.key_length": latent.kv_rank + rope.dim,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": spec.head_dim,
        "attention.value_length_mla": latent.value_dim,
    }
    if latent.query_rank:
        keys["attention.q_lora_rank"] = latent.query_rank
    if experts:
        keys |= {
            "leading_dense_block_count": len(experts.dense_layers),
            "expert_shared_count": experts.shared_ffn_dim // max(experts.ffn_dim, 1),
            "expert_weights_scale": experts.factor,
            "expert_weights_norm": experts.normalised,
            "expert_gating_func": 2 if experts.scoring == "sigmoid" else 1,
            "expert_group_count": experts.groups,
            "expert_group_used_count": experts.top_groups,
        }
    return keys


def _shape(spec: ModelSpec, stored: Stored) -> tuple[int, ...]:
    """The shape of a tensor in a file: of what experts, or heads, have one by one, with their
    number first.
    """
    of_heads = (
        {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads} if spec.qk_norm == "heads" else {}
    )
    names = [share.name for share in stored.shares]
    count = of_heads.get(names[0].rpartition(".")[2], 0)
    if ".experts." in names[0] or ".heads." in names[0]:
        count = len({name.split(".")[3] for name in names})
    return (count, stored.shape[0] // count, *stored.shape[1:]) if count else stored.shape


def _nothing(name: str, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor of zeros, which take no memory."""
    codes = np.broadcast_to(np.zeros((), np.uint8), (math.prod(shape[:-1]), shape[-1], 4))
    return StoredTensor(name, FORMATS["F32"], shape, {"codes": codes})


def _different(spec: ModelSpec, found: ModelSpec) -> str:
    """What is different in a specification that was read, in words; nothing where it is the
    same.
    """
    if fields := _different_field(spec, found, _SHARED):
        return "{} would be {}, and is {}".format(*fields)
    for name in ("rope", "window_rope"):
        rope: RopeSpec | None = getattr(spec, name)
        if not _same_rope(rope, getattr(found, name), spec.max_context):
            return (
                f"{name} would have other frequencies than by the rule "
                f"{rope.scaling if rope else 'none'}"
            )
    return ""


def _different_field(a: Any, b: Any, ignored: Collection[str] = ()) -> tuple[str, Any, Any] | None:
    """The first field in which two records differ, with what it is in the second and in the
    first.
    """
    for name, value in vars(a).items():
        other = getattr(b, name)
        if name in ignored or value == other:
            continue
        if hasattr(value, "__dataclass_fields__") and type(value) is type(other):
            if inner := _different_field(value, other):
                return f"{name}.{inner[0]}", *inner[1:]
        elif not (
            isinstance(value, float)
            and isinstance(other, float)
            and math.isclose(value, other, rel_tol=_PRECISION)
        ):
            return name, other, value
    return None


def _same_rope(a: RopeSpec | None, b: RopeSpec | None, max_context: int) -> bool:
    """Whether two rotary embeddings have the same frequencies in short texts and in long ones."""
    if a is None or b is None or a.dim != b.dim:
        return a is b

    def numbers(rope: RopeSpec) -> NDArray[np.float64]:
        found = [inverse_frequencies(rope, max_context, context) for context in (1, max_context)]
        return np.array([[*frequencies, factor] for frequencies, factor in found])

    return np.allclose(numbers(a), numbers(b), _PRECISION, 0)
