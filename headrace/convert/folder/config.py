"""A model that has no folder yet, as one: `config.json` and the files of its tokenizer, from what
its GGUF file says.
"""

import json
from pathlib import Path
from typing import Any

from headrace.checkpoint.load import Checkpoint
from headrace.errors import HeadraceError, UnsupportedModelError
from headrace.model import FAMILIES
from headrace.model.family import ConfigLayout
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec, RopeSpec

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def described_files(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Write the files of the tokenizer, and give `config.json`. Raises UnsupportedModelError as
    `config_of` does.
    """
    config = config_of(checkpoint.spec)
    tokenizer = checkpoint.load_tokenizer()
    named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.spec.max_context,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(
        folder / "tokenizer_config.json",
        described | {name: token for name, token in named.items() if token},
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids) or None}
    _write_json(folder / "generation_config.json", ids)
    if checkpoint.chat_template:
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")
    if checkpoint.tool_template:
        others = folder / "additional_chat_templates"
        others.mkdir()
        (others / "tool_use.jinja").write_text(checkpoint.tool_template, encoding="utf-8")
    return config | {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a model, from which the same model is read.

    Raises UnsupportedModelError where that is not so: what a family has of its own is only in its
    own files.
    """
    layout = FAMILIES[spec.architecture].config
    if layout is None:
        raise UnsupportedModelError(
            f"a model of the family {spec.architecture} comes in no folder: convert it to "
            "a GGUF file"
        )
    config = {layout.fields.get(name, name): value for name, value in _usual(spec, layout).items()}
    try:
        found = layout.spec(JsonFields(config, "config.json").named(layout.fields))
    except HeadraceError as error:
        raise _refusal(spec, str(error)) from error
    different = [
        name
        for name, value in vars(found).items()
        if name != "name" and value != getattr(spec, name)
    ]
    if different:
        raise _refusal(
            spec,
            f"{different[0]} would be {getattr(found, different[0])}, and is "
            f"{getattr(spec, different[0])}",
        )
    return config


def _refusal(spec: ModelSpec, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this {spec.architecture} model cannot be described in a folder ({why}): convert "
        "it to a GGUF file"
    )


def _usual(spec: ModelSpec, layout: ConfigLayout) -> dict[str, Any]:
    """The fields that most families have, under the names that these have for them."""
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
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps" if spec.norm == "rms" else "layer_norm_eps": spec.norm_eps,
        "hidden_act": _ACTIVATIONS.get(spec.activation, spec.activation),
        "attention_bias": spec.output_bias,
        "mlp_bias": spec.mlp_bias,
        "sliding_window": max(windows) if windows else None,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": "bfloat16",
        **(_rope(spec.rope) if spec.rope else {}),
    }


def _rope(rope: RopeSpec) -> dict[str, Any]:
    scaling = (
        {"rope_type": rope.scaling, "factor": rope.factor} if rope.scaling == "linear" else None
    )
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
