"""Medusa heads from files and folders, in the layouts of their makers (Cai et al. 2024).

The authors' files name head i's block j `{i}.{j}.linear` and its matrix of logits `{i}.{n}`, after
n blocks (FasterDecoding/Medusa). vLLM names them `blocks.{i}.layers.{j}` and `lm_heads.{i}`, or
has one `lm_head` for all heads. TensorRT-LLM names blocks `{i}.medusa_layers.{j}.linear`. Heads of
TGI's version 2 have no matrix: the target's gives their logits.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.checkpoint.files import find, list_names, read_json
from headrace.checkpoint.names import MEDUSA_PREFIXES
from headrace.checkpoint.safetensors import read_folder, read_safetensors
from headrace.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor

_SHARED_LOGITS = "head.weight"
_LOGITS_END = ".logits"
_PREFIX = re.compile(r"^(?:medusa_heads?|heads)\.")
_BLOCK = (
    re.compile(r"(\d{1,4})\.(?:medusa_layers\.|blocks\.)?(\d{1,4})\.linear\.(weight|bias)"),
    re.compile(r"blocks\.(\d{1,4})\.layers\.(\d{1,4})\.(weight|bias)"),
)
_LOGITS = (
    re.compile(r"(\d{1,4})\.lm_head\.weight"),
    re.compile(r"lm_heads\.(\d{1,4})\.weight"),
)
_AUTHORS_LOGITS = re.compile(r"\d{1,4}\.\d{1,4}\.weight")
_NUMBER = re.compile(r"\d{1,4}(?=\.)")
_NUMBERS = re.compile(r"\d{1,4}\.(\d{1,4})\.linear\.")
_MAX_HEADS = 16
_MAX_BLOCKS = 64
_MAX_SHOWN = 3
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def read_heads(path: Path, spec: ModelSpec, num_tokens: int) -> dict[str, StoredTensor]:
    """Read Medusa heads from a safetensors file or a folder, under the names of this engine.

    Head i has blocks `medusa.{i}.{j}.linear.weight` [dim, dim], with or without a bias [dim], and
    `medusa.{i}.{n}.weight` [vocab, dim] after its n blocks. That matrix may be padded to another
    number of rows, from `num_tokens` on. If heads have none, `medusa.head.weight` or the target's
    head gives the logits.

    Raises ModelNotFoundError if there is no file, UnsupportedModelError for a pickle, and
    FormatError if a tensor is missing, unknown or of a wrong shape.
    """
    stored = {_usual_name(name) or name: tensor for name, tensor in _stored(path).items()}
    blocks = [int(match[1]) for name in stored if (match := _NUMBERS.match(name))]
    num_blocks = min(1 + max(blocks, default=0), _MAX_BLOCKS)
    ends = [name for name in stored if name.endswith(_LOGITS_END)]
    for name in ends:
        stored[f"{name.removesuffix(_LOGITS_END)}.{num_blocks}.weight"] = stored.pop(name)

    expected = _expected(stored, num_blocks, spec)
    if wrong := sorted(stored.keys() ^ expected.keys())[:_MAX_SHOWN]:
        raise FormatError(
            f"{path.name}: not Medusa heads: missing or unknown tensors {', '.join(wrong)}; choose "
            "heads of Medusa for this model"
        )
    for name, shape in expected.items():
        if name == _SHARED_LOGITS or name.endswith(f".{num_blocks}.weight"):
            stored[name] = _padded_head(stored[name], num_tokens, spec.vocab_size)
        if stored[name].shape != shape:
            base = _base_model(path)
            raise FormatError(
                f"{path.name}: tensor {name} has shape {list(stored[name].shape)}, but this "
                f"model needs {list(shape)}; choose heads that were trained for this model"
                + (f": these are for {base}" if base else "")
            )
    return {
        f"medusa.{name}": replace(tensor, name=f"medusa.{name}") for name, tensor in stored.items()
    }


def _expected(
    stored: Mapping[str, StoredTensor], num_blocks: int, spec: ModelSpec
) -> dict[str, tuple[int, ...]]:
    """The tensors of as many heads and parts as the names `stored` tell of, with their shapes."""
    numbers = [int(match[0]) for name in stored if (match := _NUMBER.match(name))]
    count = min(1 + max(numbers, default=0), _MAX_HEADS)
    shapes: dict[str, tuple[int, ...]] = {}
    has_bias = not stored or any(name.endswith(".bias") for name in stored)
    for block in range(num_blocks):
        shapes[f"{block}.linear.weight"] = spec.dim, spec.dim
        if has_bias:
            shapes[f"{block}.linear.bias"] = (spec.dim,)
    has_logits = any(name.endswith(f".{num_blocks}.weight") for name in stored)
    if has_logits or not stored:
        shapes[f"{num_blocks}.weight"] = spec.vocab_size, spec.dim
    expected = {f"{i}.{name}": shape for i in range(count) for name, shape in shapes.items()}
    if _SHARED_LOGITS in stored:
        expected[_SHARED_LOGITS] = spec.vocab_size, spec.dim
    return expected


def num_heads(tensors: Mapping[str, StoredTensor]) -> int:
    """Return the number of heads, from the names that `read_heads` gives."""
    return len({name.split(".")[1] for name in tensors if name.endswith(".linear.weight")})


def _stored(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, or those of the heads in a folder."""
    pickle = path if path.is_file() else _pickle_in(path)
    if pickle and pickle.suffix in _PICKLES:
        raise UnsupportedModelError(
            f"medusa_heads '{pickle}' is a pickle, which can run code and is never loaded; write "
            "it as safetensors: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
            "'medusa_lm_head.safetensors')"
        )
    if path.is_file():
        return read_safetensors(path)
    if not os.path.isdir(path):
        raise ModelNotFoundError(
            f"medusa_heads '{path}' is not a file or folder; set the path of a safetensors file, "
            "or of the folder that has it"
        )
    stored = read_folder(path)
    with_model = {name: each for name, each in stored.items() if name.startswith(MEDUSA_PREFIXES)}
    has_model = any(_usual_name(name) is None for name in stored)
    return with_model if with_model and has_model else stored


def _pickle_in(path: Path) -> Path | None:
    """A pickle in a folder that has no safetensors file."""
    names = list_names(path) if os.path.isdir(path) else []
    if any(name.endswith(".safetensors") for name in names):
        return None
    return next((path / name for name in names if name.endswith(_PICKLES)), None)


def _base_model(path: Path) -> str:
    """The name of the model that a folder's heads were trained for; empty if it is not stated."""
    file = find(path, "config.json") if os.path.isdir(path) else None
    name = read_json(file).get("base_model_name_or_path") if file else None
    return name[:200] if isinstance(name, str) else ""


def _usual_name(name: str) -> str | None:
    """The name in the authors' layout; `{i}.logits` if it has no block number, `head.weight` for
    the logits of all heads. None for a name that is not a head's.
    """
    bare = _PREFIX.sub("", name)
    if bare == "lm_head.weight":
        return _SHARED_LOGITS
    for pattern in _BLOCK:
        if match := pattern.fullmatch(bare):
            return "{}.{}.linear.{}".format(*match.groups())
    for pattern in _LOGITS:
        if match := pattern.fullmatch(bare):
            return match[1] + _LOGITS_END
    return bare if _AUTHORS_LOGITS.fullmatch(bare) else None


def _padded_head(tensor: StoredTensor, num_tokens: int, size: int) -> StoredTensor:
    """Cut or pad the matrix of a head to `size` rows; padding draws no accepted token."""
    if len(tensor.shape) != 2 or not num_tokens <= tensor.rows != size:
        return tensor
    return tensor.take(tensor.name, np.minimum(np.arange(size), tensor.rows - 1))
