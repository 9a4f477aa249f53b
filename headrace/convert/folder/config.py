"""The JSON files of a folder for a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.load import Checkpoint
from headrace.errors import HeadraceError, UnsupportedModelError
from headrace.model import FAMILIES
from headrace.model.family import ConfigLayout
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec, RopeSpec

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
"""Names that differ from ours."""

_OF_FAMILY = ("attention_bias", "mlp_bias", "pretraining_tp", "auto_map")
"""Fields that the families of dense models have, and Qwen2-MoE does not."""


def write_config_files(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Write the tokenizer's files, and return `config.json`. Raises as `config_json`."""
    config = config_json(checkpoint.spec)
    tokenizer = checkpoint.load_tokenizer()
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.spec.max_context,
        "clean_up_tokenization_spaces": False,
    }
    special = checkpoint.named_tokens(tokenizer)
    tokenizer_config |= {name: token for name, token in special.items() if token}
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids) or None}
    _write_json(folder / "generation_config.json", ids)

    if checkpoint.chat_template:
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")
    others = dict(checkpoint.other_templates)
    if checkpoint.tool_template:
        others["tool_use"] = checkpoint.tool_template
    if others:
        (folder / "additional_chat_templates").mkdir()
    for name, text in others.items():
        path = folder / "additional_chat_templates" / f"{name}.jinja"
        path.write_text(text, encoding="utf-8")
    return config | {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def config_json(spec: ModelSpec) -> dict[str, Any]:
    """Make a `config.json`. Raises UnsupportedModelError if the family needs other fields."""
    layout = FAMILIES[spec.architecture].config
    if layout is None:
        raise UnsupportedModelError(
            f"the family {spec.architecture} has no folder format; convert the model to GGUF"
        )
    values = _usual(spec, layout) | _experts(spec)
    return checked_config(
        spec, layout, {layout.fields.get(key, key): values[key] for key in values}
    )


def checked_config(spec: ModelSpec, layout: ConfigLayout, config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` if it describes this model. Raises UnsupportedModelError."""
    try:
        result = layout.spec(JsonFields(config, "config.json").named(layout.fields))
    except HeadraceError as error:
        raise _refusal(spec, error.reason) from error
    for name, value in vars(result).items():
        expected = getattr(spec, name)
        if name != "name" and value != expected:
            raise _refusal(spec, f"{name} would be {value} instead of {expected}")
    return config


def rebuilt_config(spec: ModelSpec, original: Mapping[str, Any]) -> dict[str, Any]:
    """Make a `config.json` for a model with other experts than `original` describes.

    Raises UnsupportedModelError if the family of `spec` would read another model.
    """
    layout = FAMILIES[spec.architecture].config
    assert layout
    config = {key: value for key, value in original.items() if key not in _OF_FAMILY}
    config |= {"architectures": [layout.architectures[0]], "model_type": layout.architectures[1]}
    config |= _experts(spec)
    return checked_config(spec, layout, config)


def _refusal(spec: ModelSpec, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a config.json cannot describe this {spec.architecture} model ({reason}); "
        "convert it to GGUF"
    )


def _usual(spec: ModelSpec, layout: ConfigLayout) -> dict[str, Any]:
    windows = set(spec.windows)
    return {
        "architectures": [layout.architectures[0]],
        "model_type": layout.architectures[1],
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": _trained_context(spec),
        "rms_norm_eps" if spec.norm == "rms" else "layer_norm_eps": spec.norm_eps,
        "hidden_act": _activation(spec),
        "attention_bias": spec.output_bias,
        "mlp_bias": spec.mlp_bias,
        "sliding_window": max(windows) if windows else None,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": "bfloat16",
        **(_rope(spec.rope) if spec.rope else {}),
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    experts = spec.experts
    if experts is None or spec.architecture != "qwen2_moe":
        return {}
    return {
        "qkv_bias": spec.qkv_bias,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_dim,
        "shared_expert_intermediate_size": experts.shared_ffn_dim,
        "norm_topk_prob": experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
        # Only transformers' loss in training reads it.
        "output_router_logits": False,
    }


def _activation(spec: ModelSpec) -> str:
    if spec.squares_activation:
        return f"{spec.activation}2"
    return _ACTIVATIONS.get(spec.activation, spec.activation)


def _trained_context(spec: ModelSpec) -> int:
    """The max length before the linear rule stretches it, as `config.json` states it."""
    if spec.rope and spec.rope.scaling == "linear":
        return round(spec.max_context / spec.rope.factor)
    return spec.max_context


def _rope(rope: RopeSpec) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if rope.scaling in ("linear", "yarn"):
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "yarn" and scaling:
        scaling |= {
            "original_max_position_embeddings": rope.original_context,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
