"""Models without weights: dummy tensors of zeros take no memory."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.checkpoint.files import list_names
from headrace.checkpoint.folder import model_name, open_folder
from headrace.checkpoint.load import Checkpoint, checked_spec
from headrace.model import tensor_shapes
from headrace.model.spec import ModelSpec
from headrace.quant.formats import FORMATS, Format, StoredTensor

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def is_config_only(path: Path) -> bool:
    if not path.is_dir():
        return path.name == "config.json"
    names = list_names(path)
    return "config.json" in names and not any(name.endswith(_WEIGHTS) for name in names)


def open_dummy_checkpoint(path: Path) -> Checkpoint:
    """Open a `config.json`. Raises UnsupportedModelError or FormatError."""
    folder = open_folder(path.parent if path.name == "config.json" else path)
    dtype = folder.config.get("dtype") or folder.config.get("torch_dtype")
    spec = replace(checked_spec(folder.spec, folder.path.name), name=model_name(folder.path))
    tensors = dummy_tensors(spec, FORMATS[_DTYPES.get(str(dtype), "BF16")])
    return Checkpoint(
        path=path,
        spec=spec,
        tensors=tensors,
        chat_template=None,
        tokenizer_source=folder.path,
    )


def dummy_tensors(spec: ModelSpec, format: Format) -> dict[str, StoredTensor]:
    """Matrices in `format`, or in BF16 if its block does not divide them; vectors in F32."""
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        if len(shape) == 1:
            stored = FORMATS["F32"]
        else:
            stored = format if shape[-1] % format.block == 0 else FORMATS["BF16"]
        rows = math.prod(shape[:-1])
        blocks = shape[-1] // stored.block
        shapes = {"codes": (rows, blocks, stored.nbytes), "block_scales": (rows, blocks)}
        parts = {
            part: np.broadcast_to(np.zeros((), kind.dtype), shapes.get(part, (rows,)))
            for part, kind in stored.parts.items()
        }
        tensors[name] = StoredTensor(name=name, format=stored, shape=shape, parts=parts)
    return tensors
