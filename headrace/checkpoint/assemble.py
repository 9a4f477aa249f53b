"""From the tensors of a file to those that the equations ask for, under our names; nothing missing, nothing left over."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import tensor_shapes
from headrace.model.family import Layout, Numbers, Stored
from headrace.model.spec import ModelSpec
from headrace.quant.formats import RAW_FORMATS, StoredTensor


def assemble(spec: ModelSpec, layout: Layout, stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """Every tensor of the model, by our name.

    Raises FormatError for one that is missing or has another shape, UnsupportedModelError for one that has no place or no meaning.
    """
    shapes = tensor_shapes(spec)
    places = {name: layout.locate(name) for name in shapes}
    rows = Counter[str]()  # of each stored tensor; several of ours may share it
    for name, (place, _) in places.items():
        rows[place.name] += shapes[name][0]
    tensors: dict[str, StoredTensor] = {}
    for name, (place, numbers) in places.items():
        tensor = _checked(stored, place.name, (rows[place.name], *shapes[name][1:]), where)
        tensors[name] = _ours(name, shapes[name], tensor, place, numbers, spec)
    for source in stored.keys() - rows.keys():
        if not source.endswith(layout.ignored) and not (spec.tied_embeddings and source == layout.tensors["head"].name):
            raise UnsupportedModelError(f"{where}: tensor {source} has no place in a {spec.architecture} model")
    return tensors


def _checked(stored: Mapping[str, StoredTensor], source: str, shape: tuple[int, ...], where: str) -> StoredTensor:
    tensor = stored.get(source)
    if tensor is None:
        raise FormatError(f"{where}: tensor {source} is missing; its shape would be {list(shape)}")
    if (tensor.rows, tensor.cols) != (math.prod(shape[:-1]), shape[-1]):
        raise FormatError(f"{where}: tensor {source} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.format.name in RAW_FORMATS:
        raise UnsupportedModelError(f"{where}: tensor {source} is stored as {tensor.format.name}, and nothing says what that stands for")
    return tensor


def _ours(name: str, shape: tuple[int, ...], tensor: StoredTensor, place: Stored, numbers: Numbers, spec: ModelSpec) -> StoredTensor:
    if place.rows is None:
        return replace(tensor, name=name, shape=shape)
    rows = place.rows(spec, numbers)
    return tensor.take(name, rows) if len(shape) == 2 else StoredTensor.from_floats(name, tensor.dequantise().reshape(-1)[rows])
