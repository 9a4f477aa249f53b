"""The key-values of a GGUF file for a folder."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.file_tensors import FileTensor
from headrace.convert.source_model import gguf_layout
from headrace.errors import HeadraceError, UnsupportedModelError
from headrace.model.fields import JsonFields
from headrace.model.rope import inverse_frequencies, yarn_temperature
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.record import frozen

_SHARED = {"name", "architecture", "has_head", "rope", "window_rope"}
"""Fields that are compared otherwise, or that GGUF does not have."""
_PRECISION = 1e-6
"""Relative, of float32 constants."""


@frozen(eq=False)
class GgufDescription:
    values: Mapping[str, Any]
    """Integers and floats have 32 bits."""
    shapes: Mapping[str, tuple[int, ...]]
    """Rows first; the number of experts or heads comes before them."""
    rope_factors: Mapping[str, StoredTensor]


def describe_model(spec: ModelSpec, tensors: Mapping[str, FileTensor]) -> GgufDescription:
    """Write the metadata of a model as GGUF keys.

    Raises UnsupportedModelError if reading the keys back gives another model.
    """
    layout = gguf_layout(spec.architecture)
    name = layout.architectures[0]
    rope_factors = _rope_factors(spec)
    shapes = {key: _shape(spec, tensor) for key, tensor in tensors.items()}
    shapes |= {key: factors.shape for key, factors in rope_factors.items()}

    keys = _usual(spec) | _rope(spec) | _experts(spec) | _own(spec, name)
    values = {"general.architecture": name, "general.type": "model", "general.name": spec.name}
    values |= {f"{name}.{key}": value for key, value in keys.items()}

    # Read the description again, with zeros for weights.
    dummies = {key: rope_factors.get(key) or _zeros(key, shape) for key, shape in shapes.items()}
    try:
        result = layout.spec(JsonFields(values, "the GGUF file"), dummies)
    except HeadraceError as error:
        raise _refusal(spec, error.reason) from error
    if difference := _difference(spec, result):
        raise _refusal(spec, difference)
    return GgufDescription(values, shapes, rope_factors)


def _refusal(spec: ModelSpec, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a GGUF file cannot describe this {spec.architecture} model ({reason}); "
        "try llama.cpp's convert_hf_to_gguf.py"
    )


def _usual(spec: ModelSpec) -> dict[str, Any]:
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
        default = yarn_temperature(rope.factor) if rope.scaling == "yarn" else 1.0
        factor = inverse_frequencies(rope, spec.max_context, spec.max_context)[1] / default
        if not math.isclose(factor, 1.0):
            keys["rope.scaling.attn_factor"] = factor
    return keys


def _rope_factors(spec: ModelSpec) -> dict[str, StoredTensor]:
    rope = spec.rope
    if rope and rope.scaling == "llama3":
        unscaled = RopeSpec(rope.dim, rope.theta)
        plain = inverse_frequencies(unscaled, spec.max_context, 0)[0]
        scaled = inverse_frequencies(rope, spec.max_context, 0)[0]
        factors: dict[str, Any] = {"rope_freqs.weight": plain / scaled}
    elif rope and rope.scaling == "longrope":
        factors = {
            "rope_factors_long.weight": rope.long_factors,
            "rope_factors_short.weight": rope.factors,
        }
    else:
        factors = {}
    return {
        name: StoredTensor.from_floats(name, np.array(values, np.float32))
        for name, values in factors.items()
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
    if experts.shared_gate:
        keys["expert_shared_feed_forward_length"] = experts.shared_ffn_dim
    return keys


def _own(spec: ModelSpec, name: str) -> dict[str, Any]:
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
            return _mla(spec)
    return {}


def _mla(spec: ModelSpec) -> dict[str, Any]:
    mla, rope, experts = spec.mla, spec.rope, spec.experts
    assert mla and rope
    keys: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": mla.kv_rank,
        "attention.key_length": mla.kv_rank + rope.dim,
        "attention.value_length": mla.kv_rank,
        "attention.key_length_mla": spec.head_dim,
        "attention.value_length_mla": mla.value_dim,
    }
    if mla.query_rank:
        keys["attention.q_lora_rank"] = mla.query_rank
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


def _shape(spec: ModelSpec, tensor: FileTensor) -> tuple[int, ...]:
    names = [part.name for part in tensor.slices]
    count = 0
    if ".experts." in names[0] or ".heads." in names[0]:
        count = len({name.split(".")[3] for name in names})
    elif spec.qk_norm == "heads":
        heads = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}
        count = heads.get(names[0].rpartition(".")[2], 0)
    return (count, tensor.shape[0] // count, *tensor.shape[1:]) if count else tensor.shape


def _zeros(name: str, shape: tuple[int, ...]) -> StoredTensor:
    codes = np.broadcast_to(np.zeros((), np.uint8), (math.prod(shape[:-1]), shape[-1], 4))
    return StoredTensor(name=name, format=FORMATS["F32"], shape=shape, parts={"codes": codes})


def _difference(spec: ModelSpec, result: ModelSpec) -> str:
    if different := _different_field(spec, result, _SHARED):
        field, value, expected = different
        return f"{field} would be {value} instead of {expected}"
    for name in ("rope", "window_rope"):
        rope: RopeSpec | None = getattr(spec, name)
        if not _same_rope(rope, getattr(result, name), spec.max_context):
            rule = rope.scaling if rope else "none"
            return f"{name} would not have the frequencies of the rule {rule}"
    return ""


def _different_field(a: Any, b: Any, ignored: Collection[str] = ()) -> tuple[str, Any, Any] | None:
    for name, value in vars(a).items():
        other = getattr(b, name)
        if name in ignored or value == other:
            continue
        if hasattr(value, "__dataclass_fields__") and type(value) is type(other):
            if inner := _different_field(value, other):
                field, theirs, ours = inner
                return f"{name}.{field}", theirs, ours
        elif not (
            isinstance(value, float)
            and isinstance(other, float)
            and math.isclose(value, other, rel_tol=_PRECISION)
        ):
            return name, other, value
    return None


def _same_rope(a: RopeSpec | None, b: RopeSpec | None, max_context: int) -> bool:
    if a is None or b is None or a.dim != b.dim:
        return a is b

    def numbers(rope: RopeSpec) -> NDArray[np.float64]:
        both = [inverse_frequencies(rope, max_context, context) for context in (1, max_context)]
        return np.array([[*frequencies, factor] for frequencies, factor in both])

    return np.allclose(numbers(a), numbers(b), _PRECISION, 0)
