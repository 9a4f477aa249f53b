"""A model of which there is nothing but `config.json`: its tensors are zeros, which take no memory,
in any format.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.checkpoint.files import list_names
from headrace.checkpoint.folder import model_name, open_folder
from headrace.checkpoint.load import Checkpoint, checked
from headrace.model import tensor_shapes
from headrace.model.spec import ModelSpec
from headrace.quant.formats import FORMATS, Format, StoredTensor

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def is_config_only(path: Path) -> bool:
    """Whether this is a `config.json`, or a folder that has one and no weights."""
    if not path.is_dir():
        return path.name == "config.json"
    names = list_names(path)
    return "config.json" in names and not any(name.endswith(_WEIGHTS) for name in names)


def open_dummy_checkpoint(path: Path) -> Checkpoint:
    """The model that a `config.json` describes, its matrices in the format that the file names.

    Raises UnsupportedModelError naming the field, FormatError for a missing or malformed one.
    """
    folder = open_folder(path.parent if path.name == "config.json" else path)
    named = folder.config.get("dtype") or folder.config.get("torch_dtype")
    spec = replace(checked(folder.spec, folder.path.name), name=model_name(folder.path))
    chosen = FORMATS[_DTYPES.get(str(named), "BF16")]
    return Checkpoint(path, spec, dummy_tensors(spec, chosen), None, folder.path)


def dummy_tensors(spec: ModelSpec, format: Format) -> dict[str, StoredTensor]:
    """Every tensor of a model: matrices in this format where their rows are whole blocks of it,
    else in BF16, and vectors in F32.
    """
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        suits = (
            FORMATS["F32"]
            if len(shape) == 1
            else format
            if shape[-1] % format.block == 0
            else FORMATS["BF16"]
        )
        rows = math.prod(shape[:-1])
        blocks = shape[-1] // suits.block
        sizes = {"codes": (rows, blocks, suits.nbytes), "block_scales": (rows, blocks)}
        parts = {
            part: np.broadcast_to(np.zeros((), kind.dtype), sizes.get(part, (rows,)))
            for part, kind in suits.parts.items()
        }
        tensors[name] = StoredTensor(name, suits, shape, parts)
    return tensors
