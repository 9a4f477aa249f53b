"""Adapters of mlx-lm (version 0.28): LoRA, DoRA and whole weights.

`adapter_config.json` has `fine_tune_type` and `lora_parameters`. In `adapters.safetensors` a
module X has `X.lora_a` [cols, rank] and `X.lora_b` [rank, rows]. For all experts of a layer they
are [experts * rank, cols] and [experts, rows, rank]. With DoRA there is also `X.m`, the length of
each row. The product is scale * (x @ lora_a) @ lora_b; versions before 0.19 had an alpha too, and
multiplied by alpha / rank. An embedding's `lora_a` is [vocab, rank], and a head that is tied to it
changes with it. Other tensors are whole weights.
"""

import re
from pathlib import Path

import numpy as np

from headrace.checkpoint.adapter_experts import add_stacks
from headrace.checkpoint.adapter_parts import (
    AdapterParts,
    Floats,
    checked_pair,
    floats_of,
    is_of_other_part,
    matrix_of,
    plain_name,
    tensors_file,
    vector_of,
)
from headrace.checkpoint.safetensors import read_safetensors
from headrace.errors import FormatError
from headrace.model.fields import JsonFields
from headrace.program.adapter import LowRank

TENSORS = "adapters.safetensors"
_NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m|weight|bias)")
_SWITCH = re.compile(r"\.(?:switch_mlp|experts)\.(gate|up|down)_proj$")
"""The matrices of all experts of a layer."""
_TYPES = ("lora", "dora", "full")


def is_mlx(config: JsonFields) -> bool:
    return "peft_type" not in config and ("lora_parameters" in config or "fine_tune_type" in config)


def read_mlx(path: Path, config: JsonFields, embeddings: frozenset[str]) -> AdapterParts:
    """Read the tensors; `embeddings` has the names of embeddings.

    Raises ModelNotFoundError, FormatError or UnsupportedModelError.
    """
    kind = config.string("fine_tune_type", "lora")
    if kind not in _TYPES:
        raise config.unsupported("fine_tune_type", f"; {', '.join(_TYPES)} are")
    parts = AdapterParts(where=TENSORS, ties_head=True)
    pairs: dict[str, dict[str, Floats]] = {}
    norms: dict[str, Floats] = {}
    switches: dict[tuple[str, str], dict[str, Floats]] = {}
    found = set[tuple[str, str]]()
    for full_name, tensor in read_safetensors(tensors_file(path, TENSORS, "adapters.npz")).items():
        if is_of_other_part(full_name):
            continue
        match = _NAME.fullmatch(full_name)
        if match is None:
            raise FormatError(
                f"{TENSORS}: tensor {full_name[:200]} is not a part of an "
                "adapter; save the adapter again with mlx-lm"
            )
        module, part = plain_name(match["module"]), match["part"]
        if (module, part) in found:
            raise FormatError(f"{TENSORS}: two tensors are {part} of {module[:200]}")
        found.add((module, part))
        if (expert := _SWITCH.search(module)) and part in ("lora_a", "lora_b"):
            half = floats_of(tensor, TENSORS)
            switches.setdefault((module, expert[1]), {})[part[-1]] = half
        elif part in ("lora_a", "lora_b"):
            pairs.setdefault(module, {})[part] = matrix_of(tensor, TENSORS)
        elif part == "m":
            norms[module] = vector_of(tensor, TENSORS)
        else:
            parts.weights[f"{module}.{part}"] = tensor

    given = config.section("lora_parameters")
    factor, alpha = given.number("scale", 20.0), given.optional_number("alpha")

    def scale_of(rank: int) -> float:
        return factor if alpha is None else factor * alpha / rank

    add_stacks(parts.stacks, switches, scale_of, TENSORS)
    for module, halves in pairs.items():
        down, up = checked_pair(module, {name: half.T for name, half in halves.items()}, TENSORS)
        scale = scale_of(len(down))
        if module in embeddings:
            parts.embeddings[module] = LowRank(np.ascontiguousarray(up.T), down.T, scale)
        else:
            parts.low_rank[module] = LowRank(np.ascontiguousarray(down), up, scale)
    if kind == "dora" and norms.keys() != pairs.keys():
        odd = min(norms.keys() ^ pairs.keys())
        raise FormatError(f"{TENSORS}: {odd[:200]} lacks its matrices or its magnitudes (m)")
    if kind != "dora" and norms:
        raise FormatError(f"{TENSORS}: {min(norms)[:200]} has magnitudes (m), which {kind} has not")
    parts.row_norms = norms
    if not pairs and not parts.weights and not parts.stacks:
        raise FormatError(f"{TENSORS}: no tensors of a language model")
    return parts
