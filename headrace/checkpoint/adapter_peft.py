"""LoRA adapters in PEFT's format (version 0.21).

A module X has `X.lora_A.weight` [rank, cols] and `X.lora_B.weight` [rows, rank], perhaps
`X.lora_B.bias`. An embedding has `X.lora_embedding_A` [rank, vocab] and `X.lora_embedding_B`
[dim, rank]. DoRA adds `X.lora_magnitude_vector`: the length of each row, or of each column of an
embedding. With `target_parameters`, X has the matrices of all experts (`adapter_experts.py`).
`X.token_adapter.trainable_tokens_delta` has rows of an embedding. Other tensors are in
place of the model's (`modules_to_save`, `bias`).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.checkpoint.adapter_experts import expert_parameters, peft_stacks
from headrace.checkpoint.adapter_parts import (
    MAX_RANK,
    AdapterParts,
    Floats,
    checked_pair,
    is_of_other_part,
    matrix_of,
    plain_name,
    tensors_file,
    vector_of,
)
from headrace.checkpoint.adapter_patterns import compiled, matches
from headrace.checkpoint.safetensors import read_safetensors
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec
from headrace.program.adapter import LowRank
from headrace.quant.formats import StoredTensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector"
    r"|token_adapter\.trainable_tokens_delta|modules_to_save|base_layer(?!\.lora_))"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<kind>weight|bias))?"
)
_WHOLE = re.compile(r"(?P<module>.+)\.(?P<kind>weight|bias)")
_NESTED = ".base_layer"
"""End of the inner module, if several parameters of one are adapted."""
_EXPERTS = re.compile(r"\.experts(?:\.base_layer)?$")
_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that keep the model's weights."""
_BIASES = (None, "none", "all", "lora_only")
_NO_EFFECT: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
_READ = frozenset(
    (
        "r",
        "rank_pattern",
        "lora_alpha",
        "alpha_pattern",
        "use_rslora",
        "init_lora_weights",
        "peft_type",
        "use_dora",
        "lora_bias",
        "bias",
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
        "target_parameters",
    )
)
_INERT = frozenset(
    (
        "peft_version",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
        "lora_dropout",
        "fan_in_fan_out",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "megatron_config",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "unsloth_fixed",
        "transformers_weights",
    )
)
"""Fields of training, and fields whose effect the tensors show."""


class _Name(NamedTuple):
    module: str
    part: str  # empty: a whole tensor
    kind: str  # "weight", "bias" or empty


def read_peft(path: Path, config: JsonFields, spec: ModelSpec) -> AdapterParts:
    """Read the tensors. Raises ModelNotFoundError, FormatError or UnsupportedModelError."""
    _check(config)
    parts = AdapterParts(where=TENSORS)
    pairs: dict[str, dict[str, Floats]] = {}
    embedding_pairs: dict[str, dict[str, Floats]] = {}
    norms: dict[str, Floats] = {}
    biases: dict[str, Floats] = {}
    for (module, part, kind), tensor in _named(
        read_safetensors(tensors_file(path, TENSORS, "adapter_model.bin"))
    ):
        match part, kind:
            case (("lora_A" | "lora_B"), "weight"):
                pairs.setdefault(module, {})[part] = matrix_of(tensor, TENSORS)
            case "lora_B", "bias":
                biases[module] = vector_of(tensor, TENSORS)
            case (("lora_embedding_A" | "lora_embedding_B"), _):
                embedding_pairs.setdefault(module, {})[part] = matrix_of(tensor, TENSORS)
            case "lora_magnitude_vector", _:
                norms[module] = vector_of(tensor, TENSORS)
            case "token_adapter.trainable_tokens_delta", _:
                parts.token_rows[module] = matrix_of(tensor, TENSORS)
            case (("" | "modules_to_save" | "base_layer"), ("weight" | "bias")):
                parts.weights[f"{module}.{kind}"] = tensor
                if part == "base_layer":
                    parts.shared.add(f"{module}.{kind}")
            case _:
                raise _unknown(tensor.name)

    _add_experts(config, parts, pairs, spec)
    for module, halves in pairs.items():
        down, up = checked_pair(module, halves, TENSORS)
        parts.low_rank[module] = LowRank(down, up, _scale(config, module, len(down)))
    for module, halves in embedding_pairs.items():
        a, b = checked_pair(module, {name[-1]: half for name, half in halves.items()}, TENSORS)
        scale = _scale(config, module, len(a))
        parts.embeddings[module] = LowRank(np.ascontiguousarray(b.T), a.T, scale)
    parts.row_norms = {module: norm for module, norm in norms.items() if module in pairs}
    parts.col_norms = {module: norm for module, norm in norms.items() if module in embedding_pairs}
    parts.added_biases = {
        module: bias * np.float32(parts.low_rank[module].scale)
        for module, bias in biases.items()
        if module in pairs
    }
    _check_parts(config, parts, norms.keys() | biases.keys())
    return parts


def _add_experts(
    config: JsonFields, parts: AdapterParts, pairs: dict[str, dict[str, Floats]], spec: ModelSpec
) -> None:
    """Move the pairs of parameters of experts from `pairs` to the stacks."""
    if spec.experts is None:
        return
    modules = {module.removesuffix(_NESTED) for module in pairs if _EXPERTS.search(module)}
    if not modules:
        return
    parameters = {
        module: expert_parameters(config.get("target_parameters"), module, CONFIG)
        for module in sorted(modules)
    }
    nested = [name for name in pairs if name.removesuffix(_NESTED) in modules]
    max_rank = spec.experts.num_experts * MAX_RANK
    halves = {name: checked_pair(name, pairs.pop(name), TENSORS, max_rank) for name in nested}
    parts.stacks = peft_stacks(
        halves, parameters, lambda name, rank: _scale(config, name, rank), spec, TENSORS
    )


def token_indices(config: JsonFields, module: str) -> list[int]:
    """The tokens whose rows an adapter of the embedding `module` has. Raises FormatError."""
    given = config.get("trainable_token_indices")
    if isinstance(given, dict):
        given = next(
            (value for key, value in given.items() if _matches(plain_name(key), module)), None
        )
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i < 2**31 for i in given):
        raise FormatError(
            f"{CONFIG}: trainable_token_indices has no list of token ids for {module[:200]}"
        )
    return given


def _check(config: JsonFields) -> None:
    if config.get("peft_type") != "LORA":
        raise config.unsupported("peft_type", "; LORA is")
    if config.get("init_lora_weights", True) not in _INITS:
        raise config.unsupported(
            "init_lora_weights",
            ": it changes the model's own weights; convert the adapter to a plain LoRA with PEFT",
        )
    if config.get("bias") not in _BIASES:
        raise config.unsupported("bias", "; leave it out, or use all or lora_only")
    for key in config:
        if key not in _READ and key not in _INERT and config.get(key) not in _NO_EFFECT:
            raise config.unsupported(
                key, "; merge the adapter with PEFT (merge_and_unload) and load the merged model"
            )


def _named(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[_Name, StoredTensor]]:
    """The parsed names. Raises UnsupportedModelError, or FormatError for several adapters."""
    adapters = set[str]()
    named: dict[_Name, StoredTensor] = {}
    repeated: list[_Name] = []
    for full_name, tensor in tensors.items():
        if is_of_other_part(full_name):
            continue
        match = _NAME.fullmatch(full_name) or _WHOLE.fullmatch(full_name)
        if match is None:
            raise _unknown(full_name)
        found = match.groupdict()
        if adapter := found.get("adapter"):
            adapters.add(adapter)
        name = _Name(plain_name(found["module"]), found.get("part") or "", found["kind"] or "")
        if name in named:
            repeated.append(name)
        named[name] = tensor
    if len(adapters) > 1:
        raise FormatError(
            f"{TENSORS}: the adapters {', '.join(sorted(adapters))[:200]} are in one file; "
            "save each in a folder of its own"
        )
    for module, part, kind in repeated:
        raise FormatError(f"{TENSORS}: two tensors are {part or kind} of {module[:200]}")
    if not named:
        raise FormatError(f"{TENSORS}: no tensors of a language model")
    yield from named.items()


def _unknown(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{TENSORS}: tensor {name[:200]} is not a known part of a LoRA adapter; merge the adapter "
        "with PEFT (merge_and_unload) and load the merged model"
    )


def _check_parts(config: JsonFields, parts: AdapterParts, extra: set[str]) -> None:
    if alone := sorted(extra - parts.low_rank.keys() - parts.embeddings.keys()):
        raise FormatError(f"{TENSORS}: {alone[0][:200]} has no low-rank matrices")
    adapted = parts.low_rank.keys() | parts.embeddings.keys()
    with_norms = parts.row_norms.keys() | parts.col_norms.keys()
    uses_dora = config.flag("use_dora", False)
    if odd := sorted(adapted - with_norms if uses_dora else with_norms):
        state = "no magnitude vector" if uses_dora else "a magnitude vector"
        raise FormatError(
            f"{TENSORS}: {odd[0][:200]} has {state}, and {CONFIG} has use_dora = {uses_dora}; "
            "save the adapter again with PEFT"
        )
    for name in _strings(config, "modules_to_save"):
        module = plain_name(name)
        if not any(_matches(module, found.rpartition(".")[0]) for found in parts.weights):
            raise FormatError(
                f"{CONFIG}: modules_to_save has {name[:200]}, and {TENSORS} has no tensor of it; "
                "save the adapter again"
            )


def _strings(config: JsonFields, key: str) -> list[str]:
    given = config.get(key)
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise FormatError(f"{CONFIG}: {key} must be a list of names")
    return given


def _scale(config: JsonFields, module: str, rank: int) -> float:
    alpha, patterns = config.number("lora_alpha", 8.0), config.section("alpha_pattern")
    for pattern in patterns:
        name = pattern.removeprefix("^").removesuffix("$").replace(r"\.", ".")
        if not re.search(r"[^\w.-]", name):
            is_of_module = _matches(plain_name(name), module)
        elif (expression := compiled(pattern)) is not None:
            at_start = pattern.startswith("^")
            names = (f"model.{module}", module)
            is_of_module = any(matches(expression, name, at_start=at_start) for name in names)
        else:
            raise UnsupportedModelError(
                f"{CONFIG}: alpha_pattern {pattern[:80]!r} is a regular expression with other "
                "elements than names, ., *, +, \\d, \\w and (a|b); list the modules by name"
            )
        if is_of_module:
            alpha = patterns.number(pattern)
            break
    return alpha / (rank**0.5 if config.flag("use_rslora", False) else rank)


def _matches(name: str, module: str) -> bool:
    """Whether a configuration's name, perhaps the end of one, is of this module."""
    return f".{module}".endswith(f".{name}")
