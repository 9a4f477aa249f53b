"""Writing a model as a Hugging Face folder: safetensors, `config.json`, and whatever else a folder
had that is no weight.
"""

import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.files import list_names, member, read_json
from headrace.convert.bitsandbytes import BitsAndBytes, LlmInt8
from headrace.convert.compressed_tensors import CompressedTensors
from headrace.convert.disassemble import Stored
from headrace.convert.folder.config import config_of, described_files
from headrace.convert.folder.safetensors_plan import safetensors_plan
from headrace.convert.output import check_room, unfinished
from headrace.convert.packing import Packing
from headrace.convert.source_model import Original
from headrace.convert.tensor_file import PlannedTensor, TensorFile
from headrace.errors import UnsupportedModelError
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.spec import PLAIN, QuantSpec, encoded
from headrace.record import frozen

_CONFIG = "config.json"
_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"),
    *(".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
)
_CHUNK_VALUES = 1 << 24
"""Numbers that are float32 at a time."""


@frozen(eq=False)
class FolderPlan:
    """What a folder will have, by its own names."""

    quantised: Mapping[str, Stored]
    plain: Mapping[str, tuple[Stored, PlannedTensor]]
    """All others."""
    packing: Packing | None
    dtype: str | None
    """What all plain numbers are, where they are all the same."""

    @property
    def names(self) -> list[str]:
        """The matrices of ours that have to come quantised."""
        return [share.name for stored in self.quantised.values() for share in stored.shares]

    def planned(self) -> list[PlannedTensor]:
        """All tensors of the file. Raises RequestError for a matrix that does not fit the
        format.
        """
        result = []
        for name, stored in self.quantised.items():
            assert self.packing
            result += self.packing.planned(name, *stored.shape)
        return result + [planned for _, planned in self.plain.values()]


def packing_of(to: QuantSpec) -> Packing:
    """The writer of the files that have a format. Raises RequestError for one that no folder
    has.
    """
    if to.has_wide_outliers:
        return LlmInt8()
    return BitsAndBytes(to) if to.codebook in ("nf4", "fp4") else CompressedTensors(to)


def plan_folder(
    original: Original, packing: Packing | None, names: Collection[str], dtype: str | None = None
) -> FolderPlan:
    """Quantise those of our matrices `names` that lie in a matrix of the folder by themselves or
    together, row by row.

    All others are in `dtype`, or as they are in the original; what is quantised there becomes BF16.
    Raises UnsupportedModelError for a GGUF file whose model no `config.json` describes, or whose
    experts a folder would have in one tensor.
    """
    if not original.is_folder:
        config_of(original.checkpoint.spec)
    quantised: dict[str, Stored] = {}
    plain: dict[str, tuple[Stored, PlannedTensor]] = {}
    for name, stored in original.stored(as_folder=True).items():
        source = original.tensors.get(name) if original.is_folder else None
        shape = source.shape if source else stored.shape
        if source is None and any(".experts." in share.name for share in stored.shares[1:]):
            raise UnsupportedModelError(
                f"tensor {name} would hold several experts, in a shape that only the "
                "folder of such a model says"
            )
        is_rows = len(shape) == 2 and not stored.is_transposed
        if packing and is_rows and all(share.name in names for share in stored.shares):
            quantised[name] = stored
        else:
            kept = source.format.name if source and source.format.name in PLAIN else "BF16"
            nbytes = FORMATS[dtype or kept].nbytes * math.prod(shape)
            plain[name] = stored, PlannedTensor(name, dtype or kept, shape, nbytes)
    return FolderPlan(quantised, plain, packing, dtype)


def write_folder(
    original: Original,
    out: Path,
    plan: FolderPlan,
    tensors: Mapping[str, StoredTensor],
    results: Iterable[tuple[str, StoredTensor]],
) -> None:
    """Write it: `tensors` are ours, of which `results` are those that were quantised, in any order.

    Raises HeadraceError where the disk refuses, and what `results` raises; nothing is left at `out`
    then.
    """
    layout = safetensors_plan(plan.planned())
    check_room(out, layout.size)
    with unfinished(out) as folder:
        folder.mkdir()
        checkpoint = original.checkpoint
        config = (
            copied_files(checkpoint.path, folder)
            if original.is_folder
            else described_files(checkpoint, folder)
        )
        if plan.packing:
            left = {
                name.removesuffix(".weight")
                for name, (_, planned) in plan.plain.items()
                if len(planned.shape) == 2
            } | {original.head}
            config["quantization_config"] = plan.packing.config(sorted(left))
        if plan.dtype:
            config["dtype" if "dtype" in config else "torch_dtype"] = _DTYPES[plan.dtype]
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        file = TensorFile(folder / "model.safetensors", layout)
        for name, (stored, planned) in plan.plain.items():
            file.write(name, _numbers(stored, tensors, planned.format))
        for name, parts in _whole(plan.quantised, results):
            assert plan.packing
            for part, numbers in plan.packing.packed(name, parts).items():
                file.write(part, [numbers])
        file.close()


def copied_files(source: Path, folder: Path) -> dict[str, Any]:
    """Copy what is no weight from a folder to another; gives its `config.json`, without the
    quantisation that it had.
    """
    for name in list_names(source):
        path = source / name
        if name == "additional_chat_templates" and path.is_dir():
            shutil.copytree(path, folder / name)
        elif (
            name != _CONFIG
            and not name.endswith(_WEIGHTS)
            and not name.startswith(".")
            and path.is_file()
        ):
            shutil.copyfile(member(source, name), folder / name)
    return {
        key: value
        for key, value in read_json(member(source, _CONFIG)).items()
        if key != "quantization_config"
    }


def _numbers(
    stored: Stored, tensors: Mapping[str, StoredTensor], dtype: str
) -> Iterator[NDArray[Any]]:
    """A tensor as plain numbers, some rows at a time."""
    rows = stored.shape[0]
    step = (
        rows
        if len(stored.shape) == 1 or stored.is_transposed
        else max(1, _CHUNK_VALUES // stored.shape[1])
    )
    for first in range(0, rows, step):
        yield encoded(stored.values(tensors, first, min(first + step, rows)), PLAIN[dtype])


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _whole(
    wanted: Mapping[str, Stored], results: Iterable[tuple[str, StoredTensor]]
) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
    """The parts of the folder's matrices, each as soon as all of ours that it holds are there."""
    home = {share.name: name for name, stored in wanted.items() for share in stored.shares}
    waiting: dict[str, dict[str, StoredTensor]] = {name: {} for name in wanted}
    for ours, tensor in results:
        name = home[ours]
        waiting[name][ours] = tensor
        if len(waiting[name]) == len(wanted[name].shares):
            yield name, _joined(wanted[name], waiting.pop(name))
    assert not waiting, f"not quantised: {', '.join(waiting)}"


def _joined(stored: Stored, tensors: Mapping[str, StoredTensor]) -> dict[str, NDArray[Any]]:
    result: dict[str, NDArray[Any]] = {}
    for share in stored.shares:
        for key, part in tensors[share.name].parts.items():
            whole = result.setdefault(key, np.empty((stored.shape[0], *part.shape[1:]), part.dtype))
            whole[share.rows] = part
    return result
