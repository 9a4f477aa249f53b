"""LoRA adapters as PEFT stores them: a folder with `adapter_config.json` and
`adapter_model.safetensors`.

The matrices of a module are `lora_A` [rank, columns] and `lora_B` [rows, rank], with the rows of
the module's weight: those go the way that the weight's own rows go (`TensorSource.rows`), so a fused
module gives each of our weights its share, and rotary rows come in our order.
"""

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
"""Ways to begin a training that leave the model's own weights as they are."""
_HARMLESS = {
    *(
        "peft_type",
        "peft_version",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
    ),
    *(
        "r",
        "rank_pattern",
        "lora_alpha",
        "alpha_pattern",
        "use_rslora",
        "lora_dropout",
        "init_lora_weights",
        "fan_in_fan_out",
    ),
    *(
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "megatron_config",
    ),
    *(
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "ensure_weight_tying",
    ),
}
"""Fields that are read, that the tensors say as well, or that matter in training alone."""


def read_adapter(path: Path, spec: ModelSpec) -> Adapter:
    """The adapter in a folder, for a model of this specification.

    Raises ModelNotFoundError, FormatError (malformed, or of another model's shapes) or
    UnsupportedModelError, which names what is more than low-rank matrices beside the weights of
    linear layers.
    """
    if not find(path, _CONFIG):
        raise ModelNotFoundError(f"{path}: no {_CONFIG}; an adapter is a folder as PEFT saves it")
    config = JsonFields(read_json(member(path, _CONFIG)), _CONFIG)
    _check(config)
    if not find(path, _TENSORS):
        raise ModelNotFoundError(f"{path}: no {_TENSORS}")
    modules = _modules(read_safetensors(member(path, _TENSORS)))
    family = FAMILIES[spec.architecture]
    if family.config is None:
        raise UnsupportedModelError(
            f"{_TENSORS}: nothing says what PEFT calls the modules of a {spec.architecture} model"
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
    """The two matrices of each module, by the name that it has in the model."""
    halves: dict[str, dict[str, _Floats]] = {}
    for name, tensor in tensors.items():
        if not (match := _NAME.fullmatch(name)):
            raise UnsupportedModelError(
                f"{_TENSORS}: tensor {name[:200]} is no matrix of a linear layer's adapter"
            )
        if len(tensor.shape) != 2 or tensor.format.name not in ("F32", "F16", "BF16"):
            raise FormatError(
                f"{_TENSORS}: tensor {name[:200]} is {tensor.format.name} "
                f"{list(tensor.shape)}, and no matrix of floats"
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
                f"{_TENSORS}: {module[:200]} has {shapes}; they go together, with a rank "
                f"of up to {_MAX_RANK:,}"
            )
    return {module: (both["A"], both["B"]) for module, both in halves.items()}


def _scale(config: JsonFields, module: str, rank: int) -> float:
    """The factor of a module: alpha / rank or, with rank stabilisation (Kalajdzievski 2023), alpha
    / sqrt(rank).
    """
    alpha, patterns = config.number("lora_alpha", 8.0), config.section("alpha_pattern")
    for pattern in patterns:
        if re.search(r"[^\w.-]", pattern):
            raise UnsupportedModelError(
                f"{_CONFIG}: alpha_pattern has a regular expression, {pattern[:80]!r}; "
                "name the modules instead"
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
    if spec.tied_embeddings:  # an adapter of the head is one of the head alone
        places["embed"] = layout.tensors["head"], ()
    found: dict[str, LowRank] = {}
    rows = Counter[str]()
    for name, (place, numbers) in places.items():
        module = place.name.removesuffix(".weight")
        if module not in modules:
            continue
        if name not in linear:
            raise UnsupportedModelError(
                f"{_TENSORS}: {module} is not one linear layer here, and adapters of "
                "others are not supported"
            )
        down, up = modules[module]
        needs = shapes[name]
        if down.shape[1] != needs[1]:
            raise FormatError(
                f"{_TENSORS}: lora_A of {module} has {down.shape[1]:,} columns, and the "
                f"model needs {needs[1]:,}"
            )
        rows[module] += needs[0]
        which = np.arange(needs[0]) if place.rows is None else place.rows(spec, numbers)
        if which.max() >= len(up):
            raise FormatError(
                f"{_TENSORS}: lora_B of {module} has {len(up):,} rows, and the model needs more"
            )
        found[name] = LowRank(
            np.ascontiguousarray(down), np.ascontiguousarray(up[which]), scales[module]
        )
    for module, (_, up) in modules.items():
        if module not in rows:
            raise UnsupportedModelError(
                f"{_TENSORS}: {module} has no place in a {spec.architecture} model of "
                f"{spec.num_layers} layers"
            )
        if rows[module] != len(up):
            raise FormatError(
                f"{_TENSORS}: lora_B of {module} has {len(up):,} rows, and the model "
                f"needs {rows[module]:,}"
            )
    return found
