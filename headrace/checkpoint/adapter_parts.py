"""The contents of an adapter's file, before they are placed in a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.files import find, member
from headrace.errors import FormatError, ModelNotFoundError
from headrace.program.adapter import LowRank
from headrace.quant.formats import StoredTensor
from headrace.quant.spec import PLAIN

Floats = NDArray[np.float32]
MAX_RANK = 1024
_WRAPPERS = (
    "base_model",
    "model",
    "language_model",
    "text_model",
    "transformer",
    "gpt_neox",
)
_OTHER_PARTS = frozenset(
    (
        "vision_tower",
        "vision_model",
        "vision_encoder",
        "vision_embed_tokens",
        "visual",
        "embed_vision",
        "multi_modal_projector",
        "mm_projector",
        "audio_tower",
        "embed_audio",
    )
)
"""Parts of multimodal models next to the language model."""


class Stack(NamedTuple):
    """Matrices of all experts of a layer, for their gates and ups together or one of the parts."""

    name: str
    """The module that errors name."""
    down: Floats  # [experts, rank, cols]
    up: Floats  # [experts, rows, rank]
    scale: float


Stacks = dict[tuple[int, str], Stack]
"""By layer and part: `gate_up`, `gate`, `up` or `down`."""


@dataclass(eq=False)
class AdapterParts:
    """Changes by module, with rows in the order of the file."""

    where: str
    """The file that errors name."""
    low_rank: dict[str, LowRank] = field(default_factory=dict)
    embeddings: dict[str, LowRank] = field(default_factory=dict)
    """`up` [vocab, rank] and `down` [rank, dim]."""
    row_norms: dict[str, Floats] = field(default_factory=dict)
    col_norms: dict[str, Floats] = field(default_factory=dict)
    added_biases: dict[str, Floats] = field(default_factory=dict)
    token_rows: dict[str, Floats] = field(default_factory=dict)  # [tokens, dim]
    weights: dict[str, StoredTensor] = field(default_factory=dict)
    """Whole tensors, by their names with `.weight` or `.bias`."""
    shared: set[str] = field(default_factory=set)
    """Whole tensors that replace the model's own, wherever it uses them."""
    stacks: Stacks = field(default_factory=dict)
    ties_head: bool = False
    """Whether changes of the embedding are changes of a tied head too."""

    @property
    def modules(self) -> set[str]:
        changes = (
            self.low_rank,
            self.embeddings,
            self.row_norms,
            self.col_norms,
            self.added_biases,
            self.token_rows,
        )
        return {module for change in changes for module in change}


def tensors_file(folder: Path, name: str, older: str) -> Path:
    """The file of the tensors. Raises ModelNotFoundError, which names an older file if it is there
    instead.
    """
    if find(folder, name):
        return member(folder, name)
    hint = ""
    if find(folder, older):
        hint = f"; {older} is a pickle or older format, which is not loaded: save the adapter again"
    raise ModelNotFoundError(f"{folder}: no {name}{hint}")


def plain_name(name: str) -> str:
    """A name without the wrappers that makers put before it.

    `base_model.model.model.layers.0.x` and `model.language_model.layers.0.x` are `layers.0.x`.
    """
    components = name.split(".")
    first = 0
    while first < len(components) - 1 and components[first] in _WRAPPERS:
        first += 1
    return ".".join(components[first:])


def is_of_other_part(name: str) -> bool:
    """Whether a tensor belongs to the vision or audio part of a multimodal model."""
    return not _OTHER_PARTS.isdisjoint(name.split("."))


def matrix_of(tensor: StoredTensor, where: str) -> Floats:
    """Raises FormatError for other than a matrix of floats."""
    if len(tensor.shape) != 2 or tensor.format.name not in PLAIN:
        raise FormatError(
            f"{where}: tensor {tensor.name[:200]} is {tensor.format.name} {list(tensor.shape)}, "
            "not a matrix of floats"
        )
    return tensor.dequantise()


def floats_of(tensor: StoredTensor, where: str) -> Floats:
    """The numbers of a tensor of any shape. Raises FormatError for other than floats."""
    if tensor.format.name not in PLAIN:
        raise FormatError(
            f"{where}: tensor {tensor.name[:200]} is {tensor.format.name} {list(tensor.shape)}, "
            "not floats; save the adapter in float32, float16 or bfloat16"
        )
    return tensor.dequantise()


def vector_of(tensor: StoredTensor, where: str) -> Floats:
    """Raises FormatError for other than floats in one dimension."""
    if max(tensor.shape, default=0) != tensor.rows * tensor.cols or tensor.format.name not in PLAIN:
        raise FormatError(
            f"{where}: tensor {tensor.name[:200]} is {tensor.format.name} {list(tensor.shape)}, "
            "not a vector of floats"
        )
    return tensor.dequantise().reshape(-1)


def checked_pair(
    module: str, halves: Mapping[str, Floats], where: str, max_rank: int = MAX_RANK
) -> tuple[Floats, Floats]:
    """The matrices [rank, cols] and [rows, rank]. Raises FormatError."""
    names = sorted(halves)
    if len(names) == 2:
        down, up = halves[names[0]], halves[names[1]]
        if down.shape[0] == up.shape[1] and down.shape[0] <= max_rank:
            return down, up
    shapes = ", ".join(f"{name} {list(halves[name].shape)}" for name in names)
    raise FormatError(
        f"{where}: {module[:200]} has {shapes}; expected both matrices with one rank of up to "
        f"{max_rank:,}"
    )
