import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.files import list_names, member
from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.note import FOLDER_NOTE, FOLDER_PRICE
from headrace.checkpoint.quantisation.stated import STATING_FILES
from headrace.convert.destination import atomic_output, check_disk_space
from headrace.convert.embedding_types import EMBED, FolderType
from headrace.convert.file_tensors import FileTensor
from headrace.convert.folder.bitsandbytes import BitsAndBytes, LlmInt8
from headrace.convert.folder.compressed_tensors import CompressedTensors
from headrace.convert.folder.config import config_json, rebuilt_config, write_config_files
from headrace.convert.folder.header import safetensors_layout
from headrace.convert.folder.matrix_writer import MatrixWriter
from headrace.convert.source_model import SourceModel
from headrace.convert.tensor_writer import PlannedTensor, TensorWriter
from headrace.errors import UnsupportedModelError
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.spec import PLAIN, QuantSpec, encode_numbers
from headrace.record import frozen
from headrace.whole_file import replace_file

_CONFIG = "config.json"
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)
_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CHUNK_VALUES = 1 << 24


@frozen(eq=False, kw_only=True)
class FolderPlan:
    quantised: Mapping[str, tuple[FileTensor, MatrixWriter]]
    plain: Mapping[str, tuple[FileTensor, PlannedTensor]]
    matrix_writer: MatrixWriter | None
    """The writer of all but embedding and head; None if no matrix is quantised."""
    embeddings: Mapping[str, QuantSpec]
    """The formats of a quantised embedding and head, by the model's name."""
    dtype: str | None
    """None keeps each tensor's type."""

    @property
    def names(self) -> list[str]:
        """The matrices that a method quantises, by the model's names."""
        parts = [part.name for tensor, _ in self.quantised.values() for part in tensor.slices]
        return [name for name in parts if name not in self.embeddings]

    def planned(self) -> list[PlannedTensor]:
        """Raises RequestError for a matrix that does not fit the format."""
        result = [part for name in self.quantised for part in self.parts(name)]
        return result + [planned for _, planned in self.plain.values()]

    def parts(self, name: str) -> list[PlannedTensor]:
        """The tensors of a quantised matrix. Raises as `planned`."""
        tensor, writer = self.quantised[name]
        rows, cols = tensor.shape
        return writer.planned(name, rows, cols)

    def config(self, head: str) -> dict[str, Any]:
        """Make the `quantization_config`; `head` names the module of the head, if there is one."""
        assert self.matrix_writer
        plain = {
            name.removesuffix(".weight")
            for name, (_, planned) in self.plain.items()
            if len(planned.shape) == 2
        }
        targets = {
            "Embedding" if name == EMBED else head: spec for name, spec in self.embeddings.items()
        }
        return self.matrix_writer.config(sorted((plain | {head}) - targets.keys()), targets)


def matrix_writer(target: QuantSpec) -> MatrixWriter:
    """Raises RequestError."""
    if target.has_wide_outliers:
        return LlmInt8()
    if target.codebook in ("nf4", "fp4"):
        return BitsAndBytes(target)
    return CompressedTensors(target)


def plan_folder(
    source: SourceModel,
    writer: MatrixWriter | None,
    names: Collection[str],
    dtype: str | None = None,
    embeddings: Mapping[str, FolderType] | None = None,
) -> FolderPlan:
    """Plan a folder in which the named matrices are quantised, and perhaps embedding and head.

    Other tensors have `dtype`, the source's type, or BF16 if the source is quantised. Raises
    UnsupportedModelError.
    """
    embeddings = embeddings or {}
    if not source.is_folder:
        config_json(source.spec)
    quantised: dict[str, tuple[FileTensor, MatrixWriter]] = {}
    quantised_embeddings: dict[str, QuantSpec] = {}
    plain: dict[str, tuple[FileTensor, PlannedTensor]] = {}
    for name, tensor in source.file_tensors(as_folder=True).items():
        stored = source.tensors.get(name) if source.is_folder else None
        shape = stored.shape if stored else tensor.shape
        if stored is None and any(".experts." in part.name for part in tensor.slices[1:]):
            raise UnsupportedModelError(
                f"tensor {name} would join several experts, in a shape that only an existing "
                "folder shows; convert the model to GGUF"
            )
        has_rows = len(shape) == 2 and not tensor.is_transposed
        chosen = embeddings.get(tensor.slices[0].name)
        if isinstance(chosen, QuantSpec):
            quantised[name] = tensor, CompressedTensors(chosen)
            quantised_embeddings[tensor.slices[0].name] = chosen
        elif writer and has_rows and all(part.name in names for part in tensor.slices):
            quantised[name] = tensor, writer
        else:
            kept = stored.format.name if stored and stored.format.name in PLAIN else "BF16"
            written = chosen or dtype or kept
            nbytes = FORMATS[written].nbytes * math.prod(shape)
            plain[name] = tensor, PlannedTensor(name, written, shape, nbytes)
    return FolderPlan(
        quantised=quantised,
        plain=plain,
        matrix_writer=writer,
        embeddings=quantised_embeddings,
        dtype=dtype,
    )


def write_folder(
    source: SourceModel,
    out: Path,
    plan: FolderPlan,
    tensors: Mapping[str, StoredTensor],
    results: Iterable[tuple[str, StoredTensor]],
) -> None:
    """Write the folder. Raises HeadraceError, and the errors of `results`; nothing remains then."""
    layout = safetensors_layout(plan.planned())
    check_disk_space(out, layout.size)
    with atomic_output(out) as folder:
        folder.mkdir()
        checkpoint = source.checkpoint
        config = (
            copy_model_files(checkpoint, folder)
            if source.is_folder
            else write_config_files(checkpoint, folder)
        )
        if source.is_rebuilt and source.is_folder:
            config = rebuilt_config(source.spec, config)
        if source.note:
            config[FOLDER_NOTE] = source.note
        if source.price:
            config[FOLDER_PRICE] = dict(source.price)
        if plan.matrix_writer:
            config["quantization_config"] = plan.config(source.head)
        if plan.dtype:
            config["dtype" if "dtype" in config else "torch_dtype"] = _TORCH_DTYPES[plan.dtype]
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

        file = TensorWriter(folder / "model.safetensors", layout)
        for name, (tensor, planned) in plan.plain.items():
            file.write(name, _numbers(tensor, tensors, planned.format))
        for name, parts in _joined_matrices(plan.quantised, results):
            for part, numbers in plan.quantised[name][1].packed(name, parts).items():
                file.write(part, [numbers])
        file.close()


def add_price(folder: Path, price: Mapping[str, Any]) -> None:
    """Add the measured loss of a written folder to its `config.json`."""
    file = folder / _CONFIG
    config = json.loads(file.read_text(encoding="utf-8")) | {FOLDER_PRICE: dict(price)}
    replace_file(file, json.dumps(config, indent=2) + "\n", survives=True)


def copy_model_files(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Return the `config.json` of the text model, without `quantization_config`."""
    source = checkpoint.path
    for name in list_names(source):
        path = source / name
        if name == "additional_chat_templates" and path.is_dir():
            shutil.copytree(path, folder / name)
            continue
        is_rewritten = name == _CONFIG or name in STATING_FILES or name.endswith(_WEIGHTS)
        is_copied = not is_rewritten and not name.startswith(".")
        if is_copied and path.is_file():
            shutil.copyfile(member(source, name), folder / name)
    opened, spec = open_folder(source), checkpoint.spec
    config = {
        key: value
        for key, value in opened.config.items()
        if key not in ("quantization_config", "compression_config", "quantization")
    }
    is_tied = spec.tied_embeddings and spec.has_head
    if is_tied != opened.spec.tied_embeddings:
        config["tie_word_embeddings"] = is_tied
    return config


def _numbers(
    tensor: FileTensor, tensors: Mapping[str, StoredTensor], dtype: str
) -> Iterator[NDArray[Any]]:
    rows = step = tensor.shape[0]
    if len(tensor.shape) == 2 and not tensor.is_transposed:
        step = max(1, _CHUNK_VALUES // tensor.shape[1])
    for first in range(0, rows, step):
        values = tensor.values(tensors, first, min(first + step, rows))
        yield encode_numbers(values, PLAIN[dtype])


def _joined_matrices(
    quantised: Mapping[str, tuple[FileTensor, MatrixWriter]],
    results: Iterable[tuple[str, StoredTensor]],
) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
    planned = {name: tensor for name, (tensor, _) in quantised.items()}
    file_names = {part.name: name for name, tensor in planned.items() for part in tensor.slices}
    waiting: dict[str, dict[str, StoredTensor]] = {name: {} for name in planned}
    for model_name, matrix in results:
        name = file_names[model_name]
        waiting[name][model_name] = matrix
        if len(waiting[name]) == len(planned[name].slices):
            yield name, _join(planned[name], waiting.pop(name))
    assert not waiting, f"not quantised: {', '.join(waiting)}"


def _join(tensor: FileTensor, matrices: dict[str, StoredTensor]) -> dict[str, NDArray[Any]]:
    result: dict[str, NDArray[Any]] = {}
    for slice_ in tensor.slices:
        for key, part in matrices[slice_.name].parts.items():
            shape = (tensor.shape[0], *part.shape[1:])
            whole = result.setdefault(key, np.empty(shape, part.dtype))
            whole[slice_.rows] = part
    return result
