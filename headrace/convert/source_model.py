"""A model that is to be converted, as its file has it: under the file's names, beside ours."""

import os
from collections.abc import Mapping
from pathlib import Path

from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.convert.disassemble import Stored, disassembled
from headrace.errors import UnsupportedModelError
from headrace.model import FAMILIES
from headrace.model.family import GgufLayout, Layout
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_UNDER = {"mistral": "llama", "mixtral": "llama", "deepseek_v3": "deepseek_v2"}
"""Families whose GGUF files go by the name of another, which computes the same."""


@frozen(eq=False)
class Original:
    """An opened model."""

    checkpoint: Checkpoint
    is_folder: bool
    tensors: Mapping[str, StoredTensor]
    """By the file's names, and in its shapes; those that belong together are one."""

    @property
    def head(self) -> str:
        """The module that makes logits, in a folder: also of a model whose embedding is its
        matrix.
        """
        layout = FAMILIES[self.checkpoint.spec.architecture].config
        return layout.tensors["head"].name.removesuffix(".weight") if layout else ""

    def stored(self, *, as_folder: bool) -> dict[str, Stored]:
        """The tensors of a file of either kind. Raises UnsupportedModelError where the family comes
        in no such file.
        """
        architecture = self.checkpoint.spec.architecture
        layout: Layout | None = (
            FAMILIES[architecture].config if as_folder else gguf_layout(architecture)
        )
        if layout is None:
            raise UnsupportedModelError(f"a model of the family {architecture} comes in no folder")
        return disassembled(
            self.checkpoint.spec, layout, self.tensors if as_folder == self.is_folder else ()
        )


def gguf_layout(architecture: str) -> GgufLayout:
    """How GGUF files have the models of a family. Raises UnsupportedModelError where there are
    none.
    """
    layout = FAMILIES[_UNDER.get(architecture, architecture)].gguf
    if layout is None:
        raise UnsupportedModelError(f"a model of the family {architecture} comes in no GGUF file")
    return layout


def open_original(path: Path) -> Original:
    """Open a model as `open_checkpoint` does, and raise what it raises."""
    checkpoint = open_checkpoint(path)
    is_folder = os.path.isdir(path)
    return Original(
        checkpoint, is_folder, open_folder(path).tensors() if is_folder else read_gguf(path).tensors
    )
