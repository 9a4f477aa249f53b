"""LoRA adapters in PEFT's format: `lora_A` [rank, columns] and `lora_B` [rows, rank] per module."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.files import find, member, read_json
from headrace.checkpoint.safetensors import read_safetensors
from headrace.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from headrace.model import FAMILIES, linear_weights, tensor_shapes
from headrace.model.family import Layout
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec
from headrace.program.adapter import Adapter, LowRank
from headrace.quant.formats import StoredTensor

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_MAX_RANK = 1024
_Floats = NDArray[np.float32]
_Matrices = tuple[_Floats, _Floats]
_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that keep the model's weights."""
_HARMLESS = {
    "peft_type",
    "peft_version",
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "r",
    "rank_pattern",
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "lora_dropout",
    "init_lora_weights",
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
    "ensure_weight_tying",
}


def read_adapter(path: Path, spec: ModelSpec) -> Adapter:
    """Read an adapter for a model of this specification.

    Raises ModelNotFoundError, FormatError, or UnsupportedModelError for other than low-rank
    matrices of linear layers.
    """
    if not find(path, _CONFIG):
        raise ModelNotFoundError(f"{path}: no {_CONFIG}; name the folder that PEFT saved")
    config = JsonFields(read_json(member(path, _CONFIG)), _CONFIG)
    _check(config)
    if not find(path, _TENSORS):
        raise ModelNotFoundError(f"{path}: no {_TENSORS}")
    modules = _modules(read_safetensors(member(path, _TENSORS)))
    family = FAMILIES[spec.architecture]
    if family.config is None:
        raise UnsupportedModelError(
            f"{_TENSORS}: PEFT's names of the modules of a {spec.architecture} model are unknown"
        )
    scales = {module: _scale(config, module, len(down)) for module, (down, _) in modules.items()}
    return _placed(modules, scales, family.config, spec)


def _check(config: JsonFields) -> None:
    if config.get("peft_type") != "LORA":
        raise config.unsupported("peft_type", "; LORA is")
    if config.get("init_lora_weights", True) not in _INITS:
        raise config.unsupported(
            "init_lora_weights",
            ": it changes the model's own weights; convert the adapter to a plain LoRA with PEFT",
        )
    for key in config:
        if key not in _HARMLESS and config.get(key) not in (None, False, "none", [], {}):
            raise config.unsupported(key)


def _modules(tensors: Mapping[str, StoredTensor]) -> dict[str, _Matrices]:
    halves: dict[str, dict[str, _Floats]] = {}
    for name, tensor in tensors.items():
        if not (match := _NAME.fullmatch(name)):
            raise UnsupportedModelError(
                f"{_TENSORS}: tensor {name[:200]} is not a LoRA matrix of a linear layer"
            )
        if len(tensor.shape) != 2 or tensor.format.name not in ("F32", "F16", "BF16"):
            raise FormatError(
                f"{_TENSORS}: tensor {name[:200]} is {tensor.format.name} "
                f"{list(tensor.shape)}, not a matrix of floats"
            )
        halves.setdefault(match["module"], {})[match["half"]] = tensor.dequantise()
    if not halves:
        raise FormatError(f"{_TENSORS}: no tensors")
    for module, both in halves.items():
        if (
            len(both) != 2
            or both["A"].shape[0] != both["B"].shape[1]
            or both["A"].shape[0] > _MAX_RANK
        ):
            shapes = ", ".join(
                f"lora_{half} {list(matrix.shape)}" for half, matrix in sorted(both.items())
            )
            raise FormatError(
                f"{_TENSORS}: {module[:200]} has {shapes}; expected both matrices with one rank "
                f"of up to {_MAX_RANK:,}"
            )
    return {module: (both["A"], both["B"]) for module, both in halves.items()}


def _scale(config: JsonFields, module: str, rank: int) -> float:
    alpha, patterns = config.number("lora_alpha", 8.0), config.section("alpha_pattern")
    for pattern in patterns:
        if re.search(r"[^\w.-]", pattern):
            raise UnsupportedModelError(
                f"{_CONFIG}: alpha_pattern {pattern[:80]!r} is a regular expression; "
                "list the modules by name"
            )
        if f".{module}".endswith(f".{pattern}"):
            alpha = patterns.number(pattern)
            break
    return alpha / (rank**0.5 if config.flag("use_rslora", False) else rank)


def _placed(
    modules: Mapping[str, _Matrices], scales: Mapping[str, float], layout: Layout, spec: ModelSpec
) -> dict[str, LowRank]:
    linear = linear_weights(spec)
    layout, shapes = (
        layout.for_names({f"{module}.weight" for module in modules}),
        tensor_shapes(spec),
    )
    places = {name: layout.source_of(name) for name, shape in shapes.items() if len(shape) == 2}
    if spec.tied_embeddings:
        # An adapter of a tied head applies to the logits, not to the embedding.
        places["embed"] = layout.tensors["head"], ()

    adapter: dict[str, LowRank] = {}
    rows = Counter[str]()
    for name, (place, numbers) in places.items():
        module = place.name.removesuffix(".weight")
        if module not in modules:
            continue
        if name not in linear:
            raise UnsupportedModelError(
                f"{_TENSORS}: {module} is not a single linear layer here; only linear layers "
                "can have an adapter"
            )
        down, up = modules[module]
        num_rows, num_cols = shapes[name]
        if down.shape[1] != num_cols:
            raise FormatError(
                f"{_TENSORS}: lora_A of {module} has {down.shape[1]:,} columns, but the "
                f"model needs {num_cols:,}"
            )
        rows[module] += num_rows
        indices = np.arange(num_rows) if place.rows is None else place.rows(spec, numbers)
        if indices.max() >= len(up):
            raise FormatError(
                f"{_TENSORS}: lora_B of {module} has {len(up):,} rows, but the model needs more"
            )
        adapter[name] = LowRank(
            np.ascontiguousarray(down), np.ascontiguousarray(up[indices]), scales[module]
        )

    for module, (_, up) in modules.items():
        if module not in rows:
            raise UnsupportedModelError(
                f"{_TENSORS}: {module} is not a module of a {spec.architecture} model with "
                f"{spec.num_layers} layers"
            )
        if rows[module] != len(up):
            raise FormatError(
                f"{_TENSORS}: lora_B of {module} has {len(up):,} rows, but the model "
                f"needs {rows[module]:,}"
            )
    return adapter
