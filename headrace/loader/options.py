"""Makes an `EngineConfig` from a caller's options, and checks names, types, bounds and
conflicts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from headrace.backend_traits import BackendName, KvChoice
from headrace.config import (
    SERVING,
    AcceptanceMethod,
    Activations,
    DraftFormat,
    EngineConfig,
    LatentAttention,
    Preset,
    RopeScaling,
)
from headrace.engine.engine import SCHEDULERS
from headrace.errors import RequestError
from headrace.loader.kv_size import MAX_BLOCKS
from headrace.loader.layers import layer_choice
from headrace.loader.peer_options import check_peer_options, with_speculative_config
from headrace.speculation.proposers import PROPOSERS, check_replaced, check_speculation
from headrace.validation import check_names, integer, number

_INTEGERS = {  # option: (min, max)
    "threads": (0, 1024),
    "tensor_parallel_size": (1, 1024),
    "pipeline_parallel_size": (1, 1024),
    "kv_blocks": (0, MAX_BLOCKS),
    "kv_offload_bytes": (0, 2**48),
    "kv_cache_dir_bytes": (1 << 20, 2**56),
    "max_model_len": (0, 2**26),
    "yarn_orig_ctx": (0, 2**26),
    "attention_window": (0, 2**26),
    "attention_sinks": (0, 2**26),
    "attention_top_blocks": (0, 2**21),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**20),
    "chunked_prefill_size": (0, 2**20),
    "max_logit_rows": (0, 2**20),
    "priority_scheduling_preemption_threshold": (0, 2000),
    "max_draft_tokens": (1, 2**10),
    "draft_top_blocks": (0, 2**21),
    "draft_depth": (1, 64),
    "learn_drafts_bytes": (0, 2**40),
    "draft_width": (1, 16),
    "seed": (0, 2**64 - 1),
}
_NULLABLE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "chunked_prefill_size",
    "rope_scaling",
    "seed",
)
"""Options whose None means the default of the backend or model, or a random number."""
_NUMBERS = {  # option: max
    "target_token_ms": 1e6,
    "multi_step_ms": 1e6,
    "queue_timeout": 1e8,
    "rope_scale": 1e4,
    "rope_theta": 1e12,
}
_CHOICES = {
    "backend": get_args(BackendName),
    "kv_dtype": get_args(KvChoice),
    "activations": get_args(Activations),
    "latent_attention": get_args(LatentAttention),
    "rope_scaling": get_args(RopeScaling),
    "proposer": PROPOSERS,
    "acceptance_method": get_args(AcceptanceMethod),
    "draft_format": get_args(DraftFormat),
    "batching": tuple(SCHEDULERS),
}
_FLAGS = (
    "enable_expert_parallel",
    "enable_sequence_parallel",
    "adaptive_speculation",
    "prefix_cache",
    "jump_forward",
    "learn_salted",
    "skip_zeros",
)
_TEXTS = (
    "activation_sparsity",
    "chat_template",
    "draft_model",
    "draft_sparsity",
    "draft_weights",
    "early_exit",
    "kv_cache_dir",
    "learn_drafts",
    "medusa_heads",
)
_ROPE_FIELDS = {
    "type": "rope_scaling",
    "rope_type": "rope_scaling",
    "factor": "rope_scale",
    "rope_theta": "rope_theta",
    "original_max_position_embeddings": "yarn_orig_ctx",
}
"""Options by the field of `rope_scaling` in a `config.json`."""


def engine_config(options: Mapping[str, Any], preset: Preset = SERVING) -> EngineConfig:
    """Return the configuration with these options, over the defaults of a preset.

    `speculative_config` may have options of drafts in the form of vLLM.
    Raises RequestError if an option is unknown, a value is out of range, or options of
    speculative decoding contradict each other.
    """
    options = with_speculative_config(_with_rope_fields(options))
    check_peer_options(options)
    check_names("option", options, (field.name for field in fields(EngineConfig)))
    checked = {name: _checked(name, value) for name, value in options.items()}
    config = EngineConfig(**dict(preset.engine) | checked)
    check_speculation(config)
    return config


def _with_rope_fields(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Spread a `rope_scaling` in the form of a `config.json`, as vLLM takes it, over options."""
    given = options.get("rope_scaling")
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise RequestError(
                f"rope_scaling is not JSON: {given[:80]!r}; write yarn, linear or none"
            ) from None
    if not isinstance(given, Mapping):
        return options
    unknown = [str(name) for name in given if name not in _ROPE_FIELDS]
    if unknown:
        raise RequestError(
            f"rope_scaling.{unknown[0][:80]} is not an option; write it in the model's config.json"
        )
    spread = {_ROPE_FIELDS[name]: value for name, value in given.items()}
    if twice := sorted(name for name in spread if name != "rope_scaling" and options.get(name)):
        raise RequestError(f"{twice[0]} is in rope_scaling too; leave one out")
    return {**options, "rope_scaling": None} | spread


def _checked(name: str, value: Any) -> Any:
    if name in _NULLABLE and value is None:
        return None
    if name in _INTEGERS:
        return integer(name, value, *_INTEGERS[name])
    if name in _NUMBERS:
        return number(name, value, 0.0, _NUMBERS[name])
    if name == "proposer":
        check_replaced(value)
    if name in _CHOICES and value not in _CHOICES[name]:
        raise RequestError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {value!r}")
    if name == "pipeline_layers":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise RequestError(f"{name} must be a list of whole numbers, not {value!r}")
        return tuple(integer(name, layers, 1, 2**16) for layers in value)
    if name == "draft_layers":
        return layer_choice(name, value)
    if name in _FLAGS and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {value!r}")
    if name in _TEXTS and not isinstance(value, str):
        raise RequestError(f"{name} must be text, not {value!r}")
    return value
