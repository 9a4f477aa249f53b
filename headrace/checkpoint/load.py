"""From a file or folder to a checked checkpoint: one specification and every tensor it calls for, under our names."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint import gguf_model, hf_model
from headrace.checkpoint.compressed_tensors import with_row_scales
from headrace.checkpoint.gguf import Metadata, read_gguf
from headrace.checkpoint.safetensors import read_folder
from headrace.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from headrace.model.names import LLAMA_GGUF, LLAMA_HF, tensor_shapes
from headrace.model.spec import ModelSpec
from headrace.quant.formats import FORMATS, StoredTensor

if TYPE_CHECKING:
    from headrace.checkpoint.tokenizer import Tokenizer

_MAX_LAYERS = 4096
_MAX_SIZE = 2**31 - 1
_MAX_WIDTH = 1 << 20
"""Most query columns: what we build per column stays small whatever a file claims."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model as it lies on disk: tensors are views of memory maps, and rotary rows are in interleaved order."""

    path: Path
    spec: ModelSpec
    tensors: Mapping[str, StoredTensor]
    chat_template: str | None
    tokenizer_source: Metadata | Path

    def load_tokenizer(self) -> "Tokenizer":
        """Build the tokenizer; raises as the two builders do. The library behind it is imported only here."""
        if isinstance(self.tokenizer_source, Path):
            from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder

            return tokenizer_from_folder(self.tokenizer_source)
        from headrace.checkpoint.tokenizer_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(self.tokenizer_source)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, or a folder with `config.json` and safetensors.

    Raises ModelNotFoundError, FormatError (malformed, missing tensor, wrong shape) or UnsupportedModelError (architecture,
    tensor type or feature that we do not know; pickled weights).
    """
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise UnsupportedModelError(f"{path.name}: a pickle can run code and is never loaded; convert the model to safetensors or GGUF")
    if path.suffix == ".safetensors":
        raise FormatError(f"{path.name}: name the folder that holds it together with config.json")
    file = read_gguf(path)
    spec = _checked(gguf_model.gguf_spec(file), path.name)
    tensors = _assemble(spec, file.tensors, LLAMA_GGUF, spec.architecture in gguf_model.HALF_SPLIT_ROPE, path.name)
    template = file.metadata.string("tokenizer.chat_template", "") or None
    return Checkpoint(path, spec, tensors, template, file.metadata)


def _open_folder(folder: Path) -> Checkpoint:
    if not (folder / "config.json").exists():
        files = sorted(folder.glob("*.gguf"))
        hint = f"; name a file in it, such as {files[0].name}" if files else ""
        raise ModelNotFoundError(f"{folder}: no config.json{hint}")
    spec = _checked(hf_model.hf_spec(folder), folder.name)
    stored = with_row_scales(read_folder(folder), folder.name)
    tensors = _assemble(spec, stored, LLAMA_HF, True, folder.name)
    return Checkpoint(folder, spec, tensors, hf_model.chat_template(folder), folder)


def _checked(spec: ModelSpec, where: str) -> ModelSpec:
    """Refuse sizes and constants with which the equations cannot be computed."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise FormatError(f"{where}: {what}")

    sizes = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_context")
    for size in sizes:
        require(0 < getattr(spec, size) <= _MAX_SIZE, f"{size} is {getattr(spec, size)}")
    require(spec.num_layers <= _MAX_LAYERS, f"{spec.num_layers:,} layers, more than {_MAX_LAYERS:,}")
    require(spec.num_heads * spec.head_dim <= _MAX_WIDTH, f"{spec.num_heads:,} heads of {spec.head_dim:,}")
    require(spec.num_heads % spec.num_kv_heads == 0, f"{spec.num_heads} heads do not share {spec.num_kv_heads} KV heads evenly")
    require(0 <= spec.norm_eps < 1, f"the norm's epsilon is {spec.norm_eps}")
    require(all(0 <= window <= _MAX_SIZE for window in spec.windows), "a sliding window is negative")
    rope = spec.rope
    require(rope.dim % 2 == 0 and 0 < rope.dim <= spec.head_dim, f"{rope.dim} rotary dimensions in heads of {spec.head_dim}")
    require(rope.theta > 1, f"the rotary base is {rope.theta}")
    require(rope.factor > 0, f"the rotary factor is {rope.factor}")
    require(0 <= rope.original_context <= _MAX_SIZE, f"the original context is {rope.original_context}")
    require(rope.low_freq_factor < rope.high_freq_factor, "low_freq_factor is not below high_freq_factor")
    require(rope.beta_fast > 0 and rope.beta_slow > 0, "beta_fast and beta_slow must be positive")
    require(len(rope.factors) in (0, rope.dim // 2), f"{len(rope.factors)} rotary factors for {rope.dim // 2} pairs")
    require(all(math.isfinite(factor) and factor > 0 for factor in rope.factors), "a rotary factor is not a positive number")
    require(all(math.isfinite(value) for value in astuple(rope) if isinstance(value, float)), "a rotary constant is not finite")
    return spec


def _assemble(
    spec: ModelSpec, stored: Mapping[str, StoredTensor], names: Mapping[str, str], half_split: bool, where: str
) -> dict[str, StoredTensor]:
    """The tensors the specification calls for, under our names; nothing missing, nothing left over."""
    orders = {"q": interleaved_rows(spec, spec.num_heads), "k": interleaved_rows(spec, spec.num_kv_heads)} if half_split else {}
    tensors: dict[str, StoredTensor] = {}
    used = set()
    for name, source, shape in _wanted(spec, names):
        tensor = stored.get(source)
        if tensor is None:
            raise FormatError(f"{where}: tensor {source} is missing; its shape would be {list(shape)}")
        if tensor.shape != shape:
            raise FormatError(f"{where}: tensor {source} has shape {list(tensor.shape)}, expected {list(shape)}")
        used.add(source)
        part = name.rpartition(".")[2]
        if part.removesuffix("_bias") in orders:
            tensor = _reordered(tensor, orders[part.removesuffix("_bias")])
        tensors[name] = replace(tensor, name=name)
    for source in stored.keys() - used:
        if not _ignorable(source, spec):
            raise UnsupportedModelError(f"{where}: tensor {source} has no place in a {spec.architecture} model")
    return tensors


def _wanted(spec: ModelSpec, names: Mapping[str, str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Our name, the file's name and the shape of each tensor."""
    for template, shape in tensor_shapes(spec).items():
        for layer in range(spec.num_layers if "{i}" in template else 1):
            yield template.format(i=layer), names[template].format(i=layer), shape


def _ignorable(source: str, spec: ModelSpec) -> bool:
    """Tensors that files carry without need: frequencies that follow from the specification, a copy of tied embeddings."""
    redundant_head = spec.tied_embeddings and source == LLAMA_HF["head"]
    return redundant_head or source == gguf_model.ROPE_FACTORS or source.endswith(("rotary_emb.inv_freq", "attn_rot_embd.weight"))


def interleaved_rows(spec: ModelSpec, num_heads: int) -> NDArray[np.int64]:
    """Where each row of an interleaved query or key matrix lies in a half-split one, [num_heads * head_dim].

    Rotary pairs are rows (2i, 2i + 1) of a head for us, (i, i + rope.dim / 2) in the file; rows beyond rope.dim stay.
    """
    head = np.arange(spec.head_dim)
    head[: spec.rope.dim] = head[: spec.rope.dim].reshape(2, -1).T.reshape(-1)
    return (np.arange(num_heads)[:, None] * spec.head_dim + head).reshape(-1)


def _reordered(tensor: StoredTensor, order: NDArray[np.int64]) -> StoredTensor:
    if len(tensor.shape) == 2:
        return replace(tensor, row_order=order)
    values = tensor.dequantise()[order]
    return replace(tensor, format=FORMATS["F32"], data=values.view(np.uint8))
