"""Where a folder states its quantisation: the files and field names of several tools.

AutoGPTQ wrote `quantize_config.json`, and AutoAWQ `quant_config.json` with names of its own, before
transformers put them into `config.json`. AutoRound (version 0.12) packs as GPTQ or AWQ and says so
in `packing_format`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.files import find, member, read_json
from headrace.checkpoint.quantisation import modelopt
from headrace.checkpoint.quantisation.method import refusal
from headrace.checkpoint.quantisation.mlx import mlx_config
from headrace.checkpoint.safetensors import read_folder

_FIELD, _OLD_FIELD = "quantization_config", "compression_config"
"""compressed-tensors wrote the second before transformers read its folders."""
_GPTQ_FILE, _AWQ_FILE = "quantize_config.json", "quant_config.json"
STATING_FILES = (_GPTQ_FILE, _AWQ_FILE, modelopt.FILE)
"""Files that state the quantisation next to `config.json`."""
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
_PACKINGS: dict[str, dict[str, Any]] = {
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm", "zero_point": True},
}
"""Formats of AutoRound (`auto_round/inference/backend.py`: GPTQ_FORMAT and others)."""
_PLAIN_BITS = 16
"""Layers with as many bits or more are not quantised."""


def stated_quantisation(config: Mapping[str, Any], path: Path) -> Any:
    """Find the quantisation with its method; None for a plain folder.

    Raises UnsupportedModelError for an unknown packing of AutoRound.
    """
    stated = (mlx_config(config), config.get(_FIELD), config.get(_OLD_FIELD))
    found = next((value for value in stated if value is not None), None)
    if isinstance(found, dict) and found.get("quant_method") in _AUTO_ROUND:
        return _auto_round(found)
    if found is None and find(path, modelopt.FILE):
        return modelopt.modelopt_config(read_json(member(path, modelopt.FILE)))
    if found is None and find(path, _GPTQ_FILE):
        return _of_quantised_layers(path, _GPTQ_FILE, lambda own: {"quant_method": "gptq", **own})
    if found is None and find(path, _AWQ_FILE):
        return _of_quantised_layers(path, _AWQ_FILE, _awq)
    return found


def _of_quantised_layers(
    path: Path, name: str, to_config: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any] | None:
    """Read a tool's file; a copy of it next to plain tensors says nothing."""
    if not any(tensor.endswith(".qweight") for tensor in read_folder(path)):
        return None
    return to_config(read_json(member(path, name)))


def _awq(own: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "awq"} | {_AWQ_NAMES.get(key, key): own[key] for key in own}


def _auto_round(given: dict[str, Any]) -> dict[str, Any]:
    packing = given.get("packing_format", "auto_round:auto_gptq")
    supported = f"auto-round with packing_format {', '.join(_PACKINGS)}"
    if not isinstance(packing, str) or packing not in _PACKINGS:
        raise refusal("packing_format", packing, supported)
    if given.get("data_type", "int") != "int":
        raise refusal("data_type", given["data_type"], f"{supported} and data_type int")
    layers = given.get("extra_config") or {}
    for name, layer in layers.items() if isinstance(layers, dict) else ():
        bits = layer.get("bits", given.get("bits")) if isinstance(layer, dict) else layer
        if type(bits) is int and bits >= _PLAIN_BITS:
            continue
        for field in ("bits", "group_size", "sym"):
            if not isinstance(layer, dict) or layer.get(field, given.get(field)) != given.get(
                field
            ):
                raise refusal(f"extra_config: {name[:100]}", layer, f"{supported}, alike")
    return given | _PACKINGS[packing]
