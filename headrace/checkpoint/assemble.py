"""From the tensors of a file to those that the equations ask for, under our names; nothing missing, nothing left over."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import tensor_shapes
from headrace.model.family import Layout, Numbers, Stored
from headrace.model.spec import ModelSpec
from headrace.quant.formats import RAW_FORMATS, StoredTensor


def assemble(spec: ModelSpec, layout: Layout, stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """Every tensor of the model, by our name.

    Raises FormatError for one that is missing or has another shape, UnsupportedModelError for one that has no place or no meaning.
    """
    layout, shapes = layout.of(stored.keys()), tensor_shapes(spec)
    places = {name: layout.locate(name) for name in shapes}
    rows = Counter[str]()  # of each stored tensor; several of ours may share it
    for name, (place, _) in places.items():
        rows[place.name] += shapes[name][0]
    tensors: dict[str, StoredTensor] = {}
    for name, (place, numbers) in places.items():
        tensor = _checked(stored, place, (rows[place.name], *shapes[name][1:]), where)
        tensors[name] = _ours(name, shapes[name], tensor, place, numbers, spec)
    for source in stored.keys() - rows.keys():
        if not source.endswith(layout.ignored) and not (spec.tied_embeddings and source == layout.tensors["head"].name):
            raise UnsupportedModelError(f"{where}: tensor {source} has no place in a {spec.architecture} model")
    return tensors


def _checked(stored: Mapping[str, StoredTensor], place: Stored, shape: tuple[int, ...], where: str) -> StoredTensor:
    """The tensor of this place, which has to hold so many rows of ours."""
    source, tensor = place.name, stored.get(place.name)
    if tensor is None:
        raise FormatError(f"{where}: tensor {source} is missing; its shape would be {list(shape)}")
    is_vector = len(shape) == 1
    found = (tensor.rows * tensor.cols,) if is_vector else (tensor.rows, tensor.cols)
    if place.transposed:
        found = (tensor.cols, tensor.rows)
    if found != (shape if is_vector else (math.prod(shape[:-1]), shape[-1])):
        raise FormatError(f"{where}: tensor {source} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.format.name in RAW_FORMATS:
        raise UnsupportedModelError(f"{where}: tensor {source} is stored as {tensor.format.name}, and nothing says what that stands for")
    if place.transposed and tensor.format.quantised:
        raise UnsupportedModelError(f"{where}: tensor {source} has its columns first, and {tensor.format.name} has the scales of rows")
    return tensor


def _ours(name: str, shape: tuple[int, ...], tensor: StoredTensor, place: Stored, numbers: Numbers, spec: ModelSpec) -> StoredTensor:
    if len(shape) == 1 and (place.rows or place.plus):
        values = tensor.dequantise().reshape(-1) + np.float32(place.plus)
        return StoredTensor.from_floats(name, values[place.rows(spec, numbers)] if place.rows else values)
    if place.transposed:
        tensor = tensor.transposed()
    if place.rows is None:
        return replace(tensor, name=name, shape=shape)
    return tensor.take(name, place.rows(spec, numbers))
