"""Model families: equations, and layouts of their files."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace.model.fields import Fields, JsonFields
from headrace.model.spec import ModelSpec
from headrace.program.op import Value
from headrace.program.trace import Tracer
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

Tensors = Mapping[str, StoredTensor]
Rows = NDArray[np.int64]
Indices = tuple[int, ...]
"""Layer, then expert or head."""

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@frozen
class TensorSource:
    """The stored tensor, or the part of one, that becomes a tensor of ours."""

    name: str
    """Name in the file, with `{}` for each index."""
    rows: Callable[[ModelSpec, Indices], Rows] | None = None
    """The stored row (or vector entry) of each of our rows."""
    transposed: bool = False
    """Whether stored rows are our columns."""
    slab: Callable[[ModelSpec, Indices], Rows] | None = None
    """The stored rows of our matrix in a stack of transposed ones; `rows` applies later."""
    offset: float = 0.0
    first_row: int = 0
    """Stored rows before ours, which nothing reads."""


@frozen(eq=False, kw_only=True)
class DraftLayers:
    """The names of layers for drafts in a model's own files (multi-token prediction)."""

    prefix: str
    """Start of their names, before the number of the layer."""
    follows_last: bool = True
    """Whether they are numbered after the model's layers, or else from 0."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Names after the number by our names, without tensors of the model's blocks; empty: the family
    has no equations for them.
    """
    row_first: bool = False
    """Whether the matrix joins the row before it with the token, or else the token with the row."""
    drafts_from_normed: bool = False
    """Whether further drafts read rows after the layer's last norm."""

    def has(self, name: str, num_layers: int) -> bool:
        """Whether the tensor `name` is of such a layer, in files of a model of `num_layers`."""
        if not name.startswith(self.prefix):
            return False
        layer = name.removeprefix(self.prefix).partition(".")[0]
        # A name comes from the file, so its number may have any length.
        is_number = layer.isdecimal() and len(layer) < 9
        return is_number and int(layer) >= (num_layers if self.follows_last else 0)


@frozen(eq=False, kw_only=True)
class Layout:
    """The names and tensors of a family in one kind of file."""

    architectures: tuple[str, ...]
    tensors: Mapping[str, TensorSource]
    """Sources by our names, with `{}` for each index."""
    alternatives: tuple[Mapping[str, TensorSource], ...] = ()
    """Sources for files that contain any of these names (in layer 0)."""
    ignored: tuple[str, ...] = ()
    """Ends of names of derived tensors."""
    draft_layers: DraftLayers | None = None
    """Set if files may contain layers for drafts."""

    def for_names(self, names: Collection[str]) -> Self:
        tensors = dict(self.tensors)
        for sources in self.alternatives:
            if any(source.name.format(0) in names for source in sources.values()):
                tensors |= sources
        return replace(self, tensors=tensors, alternatives=())

    def has(self, name: str) -> bool:
        """Whether files may have our tensor `name`."""
        return _INDEX.sub("{}", name) in self.tensors

    def source_of(self, name: str) -> tuple[TensorSource, Indices]:
        """The source of our tensor `name`, with its full name and indices."""
        indices = tuple(int(index) for index in _INDEX.findall(name))
        source = self.tensors[_INDEX.sub("{}", name)]
        return replace(source, name=source.name.format(*indices)), indices

    def is_extra_layer(self, name: str, spec: ModelSpec) -> bool:
        """Whether the file's tensor `name` is of a layer for drafts."""
        return bool(self.draft_layers and self.draft_layers.has(name, spec.num_layers))


@frozen(eq=False, kw_only=True)
class ConfigLayout(Layout):
    """A Hugging Face folder: `config.json`, which names the family, and safetensors."""

    spec: Callable[[JsonFields], ModelSpec]
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    fields: Mapping[str, str] = field(default_factory=dict)
    """Unusual names of fields: {usual: own}."""


@frozen(eq=False, kw_only=True)
class GgufLayout(Layout):
    """A GGUF file. Its key `general.architecture` names the family."""

    spec: Callable[[Fields, Tensors], ModelSpec]
    draft_layers: DraftLayers | None = DraftLayers(prefix="blk.")
    ignored: tuple[str, ...] = (
        "rope_freqs.weight",
        "attn_rot_embd.weight",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
    )


@frozen(eq=False)
class Family:
    """A model family, which `model/__init__.py` registers.

    `forward` has the equations, with our tensor names, such as `layers.3.q`. Each is the smallest
    piece that any file stores. Each layout reads the file's fields (`spec`), with the defaults of
    the reference implementation, and refuses fields that would change numbers. A layout is None
    if there are no such files.
    """

    name: str
    forward: Callable[[ModelSpec, Tracer], Value]
    config: ConfigLayout | None = None
    gguf: GgufLayout | None = None
