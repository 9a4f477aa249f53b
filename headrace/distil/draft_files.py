"""Writes a trained drafter in the layout of EAGLE-3's authors, which has no embedding."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.destination import atomic_output
from headrace.distil.draft_layer import DraftLayer
from headrace.distil.files import write_safetensors
from headrace.model.spec import ModelSpec
from headrace.quant.spec import PLAIN, encode_numbers


def write_drafter(
    out: Path,
    spec: ModelSpec,
    module: DraftLayer,
    tokens: NDArray[np.int64],
    files: Mapping[str, str],
) -> None:
    """Write a folder that `draft_model` loads, whole or not at all. Weights are in bf16.

    `tokens` [draft vocabulary] are the target's, and `files` further texts by name. Raises
    HeadraceError if the disk refuses.
    """
    with atomic_output(out) as folder:
        folder.mkdir()
        text = json.dumps(draft_config(spec), indent=2) + "\n"
        for name, content in {**files, "config.json": text}.items():
            (folder / name).write_text(content, encoding="utf-8")
        write_safetensors(folder / "model.safetensors", _arrays(spec, module, tokens))


def draft_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the `config.json` of a drafter."""
    drafter, rope = spec.drafter, spec.rope
    assert drafter and rope
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.dim,
        "target_hidden_size": drafter.target_dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": drafter.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "norm_before_residual": drafter.norm_before_residual,
        "embedding_in_residual": drafter.embedding_in_residual,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(drafter.taps)},
    }


def _arrays(
    spec: ModelSpec, module: DraftLayer, tokens: NDArray[np.int64]
) -> dict[str, tuple[str, NDArray[Any]]]:
    arrays: dict[str, tuple[str, NDArray[Any]]] = {
        name: ("BF16", encode_numbers(parameter.detach().numpy(), PLAIN["BF16"]))
        for name, parameter in module.named_parameters()
    }
    if len(tokens) < spec.vocab_size:
        has_token = np.zeros(spec.vocab_size, np.uint8)
        has_token[tokens] = 1
        arrays["d2t"] = "I64", tokens - np.arange(len(tokens))
        arrays["t2d"] = "BOOL", has_token
    return arrays
