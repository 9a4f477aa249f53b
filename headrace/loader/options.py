"""Makes an `EngineConfig` from a caller's options, and checks names, types, bounds and
conflicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from headrace.backend_traits import BackendName, KvDtype
from headrace.config import (
    SERVING,
    AcceptanceMethod,
    Activations,
    EngineConfig,
    LatentAttention,
    Preset,
)
from headrace.engine.engine import SCHEDULERS
from headrace.errors import RequestError
from headrace.loader.kv_size import MAX_BLOCKS
from headrace.speculation.proposers import PROPOSERS, check_speculation
from headrace.validation import check_names, integer, number

_INTEGERS = {  # option: (min, max)
    "threads": (0, 1024),
    "tensor_parallel_size": (1, 1024),
    "pipeline_parallel_size": (1, 1024),
    "kv_blocks": (0, MAX_BLOCKS),
    "kv_offload_bytes": (0, 2**48),
    "max_model_len": (0, 2**26),
    "attention_window": (0, 2**26),
    "attention_sinks": (0, 2**26),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**20),
    "chunked_prefill_size": (0, 2**20),
    "max_logit_rows": (0, 2**20),
    "max_draft_tokens": (1, 2**10),
    "draft_layers": (0, 4096),
    "draft_depth": (1, 64),
    "draft_width": (1, 16),
    "seed": (0, 2**64 - 1),
}
_NULLABLE = ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size")
"""Options whose None means the backend's default."""
_TIMES = {"target_token_ms": 1e6, "multi_step_ms": 1e6, "queue_timeout": 1e8}  # option: max
_CHOICES = {
    "backend": get_args(BackendName),
    "kv_dtype": get_args(KvDtype),
    "activations": get_args(Activations),
    "latent_attention": get_args(LatentAttention),
    "proposer": PROPOSERS,
    "acceptance_method": get_args(AcceptanceMethod),
    "batching": tuple(SCHEDULERS),
}
_FLAGS = (
    "enable_expert_parallel",
    "enable_sequence_parallel",
    "adaptive_speculation",
    "prefix_cache",
    "jump_forward",
)
_TEXTS = ("draft_model", "medusa_heads")


def engine_config(options: Mapping[str, Any], preset: Preset = SERVING) -> EngineConfig:
    """Return the configuration with these options, over the defaults of a preset.

    Raises RequestError if an option is unknown, a value is out of range, or options of
    speculative decoding contradict each other.
    """
    check_names("option", options, (field.name for field in fields(EngineConfig)))
    checked = {name: _checked(name, value) for name, value in options.items()}
    config = EngineConfig(**dict(preset.engine) | checked)
    check_speculation(config)
    return config


def _checked(name: str, value: Any) -> Any:
    if name in _NULLABLE and value is None:
        return None
    if name in _INTEGERS:
        return integer(name, value, *_INTEGERS[name])
    if name in _TIMES:
        return number(name, value, 0.0, _TIMES[name])
    if name in _CHOICES and value not in _CHOICES[name]:
        raise RequestError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {value!r}")
    if name == "pipeline_layers":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise RequestError(f"{name} must be a list of whole numbers, not {value!r}")
        return tuple(integer(name, layers, 1, 2**16) for layers in value)
    if name in _FLAGS and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {value!r}")
    if name in _TEXTS and not isinstance(value, str):
        raise RequestError(f"{name} must be text, not {value!r}")
    return value
