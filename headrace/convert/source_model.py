import os
from collections.abc import Mapping
from pathlib import Path

from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.convert.file_tensors import FileTensor, file_tensors
from headrace.errors import UnsupportedModelError
from headrace.model import FAMILIES
from headrace.model.family import GgufLayout, Layout
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_GGUF_FAMILY = {"mistral": "llama", "mixtral": "llama", "deepseek_v3": "deepseek_v2"}


@frozen(eq=False)
class SourceModel:
    """An opened model, with tensors by the file's names."""

    checkpoint: Checkpoint
    is_folder: bool
    tensors: Mapping[str, StoredTensor]
    """Tensors in the file's shapes."""

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def head(self) -> str:
        layout = FAMILIES[self.spec.architecture].config
        return layout.tensors["head"].name.removesuffix(".weight") if layout else ""

    def file_tensors(self, *, as_folder: bool) -> dict[str, FileTensor]:
        """Raises UnsupportedModelError."""
        architecture = self.spec.architecture
        layout: Layout | None = (
            FAMILIES[architecture].config if as_folder else gguf_layout(architecture)
        )
        if layout is None:
            raise UnsupportedModelError(
                f"the family {architecture} has no folder format; convert the model to GGUF"
            )
        names = self.tensors if as_folder == self.is_folder else ()
        return file_tensors(self.spec, layout, names)


def gguf_layout(architecture: str) -> GgufLayout:
    """Raises UnsupportedModelError."""
    layout = FAMILIES[_GGUF_FAMILY.get(architecture, architecture)].gguf
    if layout is None:
        raise UnsupportedModelError(
            f"the family {architecture} has no GGUF format; convert the model to a folder"
        )
    return layout


def open_source_model(path: Path) -> SourceModel:
    """Raises as `open_checkpoint`."""
    checkpoint = open_checkpoint(path)
    is_folder = os.path.isdir(path)
    tensors = open_folder(path).tensors() if is_folder else read_gguf(path).tensors
    return SourceModel(checkpoint, is_folder, tensors)
