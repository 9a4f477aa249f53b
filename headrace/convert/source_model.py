import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from headrace.checkpoint.assemble import stored_shapes
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.names import modules
from headrace.convert.file_tensors import FileTensor, file_tensors
from headrace.errors import UnsupportedModelError
from headrace.model import FAMILIES
from headrace.model.family import GgufLayout, Layout
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_MAX_KINDS = 4
"""Kinds of tensors of a module that are listed each."""
_GGUF_FAMILY = {"mistral": "llama", "mixtral": "llama", "deepseek_v3": "deepseek_v2"}


@frozen(eq=False)
class SourceModel:
    """An opened model, with tensors by the file's names."""

    checkpoint: Checkpoint
    is_folder: bool
    tensors: Mapping[str, StoredTensor]
    """Tensors in the file's shapes."""
    is_rebuilt: bool = False
    """Whether the specification is another one than the file's."""
    note: str = ""
    """What was lost in the tensors, for users of the output (`checkpoint/note.py`)."""
    price: Mapping[str, Any] = field(default_factory=dict)
    """The measure of this loss."""

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def head(self) -> str:
        layout = FAMILIES[self.spec.architecture].config
        return layout.tensors["head"].name.removesuffix(".weight") if layout else ""

    def embedding_names(self) -> dict[str, str]:
        """The names in a folder of `embed` and, if the model has its own, `head`."""
        return {
            part.name: name
            for name, tensor in self.file_tensors(as_folder=True).items()
            for part in tensor.slices
            if part.name in ("embed", "head")
        }

    def unused(self, *, as_folder: bool) -> list[str]:
        """The kinds of the source's tensors that a conversion does not write, with their numbers:
        other modules of a multimodal model, a head that equals the embedding, tensors that the
        loader computes, layers for drafts. A GGUF file keeps all tensors of a GGUF file.
        """
        if not (self.is_folder or as_folder):
            return []
        needed = stored_shapes(self.spec, self._layout(self.is_folder).for_names(self.tensors))
        others = sorted(self.tensors.keys() - needed.keys())
        # A scale of GGUF is written as a factor of its weight.
        others = [name for name in others if self.is_folder or not name.endswith(".scale")]
        names = [*self.checkpoint.left_out, *others]
        kinds = Counter(_INDEX.sub("{}", name) for name in names)
        by_module = Counter(modules([kind])[0] for kind in kinds)
        # A whole tower is one entry.
        counts = Counter[str]()
        for kind, count in kinds.items():
            module = modules([kind])[0]
            counts[f"{module}.*" if by_module[module] > _MAX_KINDS else kind] += count
        return [f"{kind} ({count:,})" if count > 1 else kind for kind, count in counts.items()]

    def _layout(self, as_folder: bool) -> Layout:
        architecture = self.spec.architecture
        if not as_folder:
            return gguf_layout(architecture)
        layout = FAMILIES[architecture].config
        if layout is None:
            raise UnsupportedModelError(
                f"the family {architecture} has no folder format; convert the model to GGUF"
            )
        return layout

    def file_tensors(self, *, as_folder: bool) -> dict[str, FileTensor]:
        """Raises UnsupportedModelError."""
        layout = self._layout(as_folder)
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
    return SourceModel(
        checkpoint=checkpoint,
        is_folder=isinstance(checkpoint.tokenizer_source, Path),
        tensors=checkpoint.stored,
    )
