"""From the tensors of a file to those that the equations ask for, under our names; nothing missing,
nothing left over.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import tensor_shapes
from headrace.model.family import Indices, Layout, TensorSource
from headrace.model.spec import ModelSpec
from headrace.quant.formats import RAW_FORMATS, StoredTensor

Located = tuple[tuple[int, ...], TensorSource, Indices]
"""The shape of a tensor of ours, where the file has it, and the numbers in its name."""


def assemble(
    spec: ModelSpec, layout: Layout, stored: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """Every tensor of the model, by our name.

    Raises FormatError for one that is missing or has another shape, UnsupportedModelError for one
    that has no place or no meaning.
    """
    layout = layout.for_names(stored.keys())
    places = locate_tensors(spec, layout)
    needed = _shapes(spec, places)
    tensors: dict[str, StoredTensor] = {}
    for name, (shape, place, numbers) in places.items():
        tensor = _checked(stored, place, needed[place.name], where)
        tensors[name] = _ours(name, shape, tensor, place, numbers, spec)
    for source in stored.keys() - needed.keys():
        is_needless = source.endswith(layout.ignored) or layout.is_extra_layer(source, spec)
        if not is_needless and not (spec.tied_embeddings and source == layout.tensors["head"].name):
            raise UnsupportedModelError(
                f"{where}: tensor {source} has no place in a {spec.architecture} model"
            )
    return tensors


def stored_shapes(spec: ModelSpec, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The tensors that a file of a model has to have: [rows, cols], or the length of one that holds
    vectors.
    """
    return _shapes(spec, locate_tensors(spec, layout))


def locate_tensors(spec: ModelSpec, layout: Layout) -> dict[str, Located]:
    """Every tensor that the equations ask for, by our name: its shape, where the file has it, and
    the numbers in its name.
    """
    return {name: (shape, *layout.source_of(name)) for name, shape in tensor_shapes(spec).items()}


def _shapes(spec: ModelSpec, places: Mapping[str, Located]) -> dict[str, tuple[int, ...]]:
    needed = defaultdict[str, _Needed](_Needed)
    for name, (shape, place, numbers) in places.items():
        first = int(place.slab(spec, numbers)[0]) if place.slab else 0
        needed[place.name].add(name, shape, first if place.transposed else None)
    return {name: each.shape for name, each in needed.items()}


class _Needed:
    """What a stored tensor has to hold of ours, of which several may share it."""

    def __init__(self) -> None:
        self._numbers = 0
        self._rows: dict[
            str | int, int
            # stored rows of each of ours, or of the slab from this row on that several may share
        ] = {}
        self._is_vector = False

    def add(self, name: str, shape: tuple[int, ...], slab: int | None) -> None:
        """One of ours; `slab` is the first row of the slab that it lies in, transposed."""
        self._numbers += math.prod(shape)
        self._is_vector = len(shape) == 1
        self._rows[name if slab is None else slab] = shape[0] if slab is None else shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, or its length where that is all that counts."""
        rows = sum(self._rows.values())
        return (rows,) if self._is_vector else (rows, self._numbers // rows)


def _checked(
    stored: Mapping[str, StoredTensor], place: TensorSource, shape: tuple[int, ...], where: str
) -> StoredTensor:
    """The tensor of this place, which has to be of this shape."""
    source, tensor = place.name, stored.get(place.name)
    if tensor is None:
        raise FormatError(f"{where}: tensor {source} is missing; its shape would be {list(shape)}")
    if ((tensor.rows * tensor.cols,) if len(shape) == 1 else (tensor.rows, tensor.cols)) != shape:
        raise FormatError(
            f"{where}: tensor {source} has shape {list(tensor.shape)}, expected {list(shape)}"
        )
    if tensor.format.name in RAW_FORMATS:
        raise UnsupportedModelError(
            f"{where}: tensor {source} is stored as {tensor.format.name}, and nothing "
            "says what that stands for"
        )
    if place.transposed and not place.slab and tensor.format.quantised:
        raise UnsupportedModelError(
            f"{where}: tensor {source} has its columns first, and {tensor.format.name} "
            "has the scales of rows"
        )
    return tensor


def _ours(
    name: str,
    shape: tuple[int, ...],
    tensor: StoredTensor,
    place: TensorSource,
    numbers: Indices,
    spec: ModelSpec,
) -> StoredTensor:
    if len(shape) == 1 and (place.rows or place.offset):
        values = tensor.dequantise().reshape(-1) + np.float32(place.offset)
        return StoredTensor.from_floats(
            name, values[place.rows(spec, numbers)] if place.rows else values
        )
    if place.slab:
        tensor = tensor.take(name, place.slab(spec, numbers))
    if place.transposed:
        tensor = (
            StoredTensor.from_floats(name, tensor.dequantise().T)
            if tensor.format.quantised
            else tensor.transposed()
        )
    if place.rows is None:
        return replace(tensor, name=name, shape=shape)
    return tensor.take(name, place.rows(spec, numbers))
