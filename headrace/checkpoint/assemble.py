"""Assembles the model's tensors from the tensors of a file."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace.checkpoint.key_biases import split_key_biases
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import tensor_shapes
from headrace.model.family import Indices, Layout, TensorSource
from headrace.model.spec import ModelSpec
from headrace.quant.formats import RAW_FORMATS, StoredTensor

Located = tuple[tuple[int, ...], TensorSource, Indices]
"""Shape of our tensor, its place in the file, the numbers in its name."""


def assemble(
    spec: ModelSpec, layout: Layout, stored: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """Raises FormatError for a missing or misshapen tensor, UnsupportedModelError for
    an unknown one.
    """
    layout = layout.for_names(stored.keys())
    places = locate_tensors(spec, layout)
    needed = _shapes(spec, places)
    tensors: dict[str, StoredTensor] = {}
    for name, (shape, place, numbers) in places.items():
        tensor = _checked(stored, place, needed[place.name], where)
        tensors[name] = _model_tensor(name, shape, tensor, place, numbers, spec)
    for source in stored.keys() - needed.keys():
        is_ignored = source.endswith(layout.ignored) or layout.is_extra_layer(source, spec)
        if not is_ignored and not _is_zero_bias(source, stored, needed):
            raise UnsupportedModelError(
                f"{where}: tensor {source} is not a tensor of a {spec.architecture} model"
            )
    return split_key_biases(spec, tensors)


def _is_zero_bias(
    name: str, stored: Mapping[str, StoredTensor], needed: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether a tensor adds zeros to a matrix of the model; AutoGPTQ wrote one for each layer."""
    layer, _, part = name.rpartition(".")
    if part != "bias" or f"{layer}.weight" not in needed:
        return False
    bias = stored[name]
    return bias.format.name not in RAW_FORMATS and not bias.dequantise().any()


def stored_shapes(spec: ModelSpec, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The required tensors: [rows, cols], or [entries]."""
    return _shapes(spec, locate_tensors(spec, layout))


def shapes_in_file(spec: ModelSpec, places: Mapping[str, Located]) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's tensors at these places."""
    return _shapes(spec, places)


def assemble_one(
    name: str,
    located: Located,
    needed: tuple[int, ...],
    stored: Mapping[str, StoredTensor],
    spec: ModelSpec,
    where: str,
) -> StoredTensor:
    """Our tensor `name` from a file's tensor of shape `needed`. Raises as `assemble`."""
    shape, place, numbers = located
    tensor = _checked(stored, place, needed, where)
    return _model_tensor(name, shape, tensor, place, numbers, spec)


def locate_tensors(spec: ModelSpec, layout: Layout) -> dict[str, Located]:
    return {name: (shape, *layout.source_of(name)) for name, shape in tensor_shapes(spec).items()}


def _shapes(spec: ModelSpec, places: Mapping[str, Located]) -> dict[str, tuple[int, ...]]:
    needed = defaultdict[str, _Needed](_Needed)
    for name, (shape, place, numbers) in places.items():
        first = int(place.slab(spec, numbers)[0]) if place.slab else 0
        stored = (shape[0] + place.first_row, *shape[1:])
        needed[place.name].add(name, stored, first if place.transposed else None)
    return {name: tensor.shape for name, tensor in needed.items()}


class _Needed:
    def __init__(self) -> None:
        self._numbers = 0
        # Stored rows by our tensor, or by the first row of a slab that several of ours share.
        self._rows: dict[str | int, int] = {}
        self._is_vector = False

    def add(self, name: str, shape: tuple[int, ...], slab: int | None) -> None:
        self._numbers += math.prod(shape)
        self._is_vector = len(shape) == 1
        self._rows[name if slab is None else slab] = shape[0] if slab is None else shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(self._rows.values())
        return (rows,) if self._is_vector else (rows, self._numbers // rows)


def _checked(
    stored: Mapping[str, StoredTensor], place: TensorSource, shape: tuple[int, ...], where: str
) -> StoredTensor:
    source, tensor = place.name, stored.get(place.name)
    if tensor is None:
        raise FormatError(f"{where}: tensor {source} is missing; expected shape {list(shape)}")
    stored_shape: tuple[int, ...] = (tensor.rows, tensor.cols)
    if len(shape) == 1:
        stored_shape = (math.prod(stored_shape),)
    if stored_shape != shape:
        raise FormatError(
            f"{where}: tensor {source} has shape {list(tensor.shape)}, expected {list(shape)}"
        )
    if tensor.format.name in RAW_FORMATS:
        raise UnsupportedModelError(
            f"{where}: tensor {source} has type {tensor.format.name}, which is not a type of "
            "weights without a quantisation method"
        )
    if place.transposed and not place.slab and not tensor.format.is_plain:
        raise UnsupportedModelError(
            f"{where}: tensor {source} is transposed, which {tensor.format.name} with its scales "
            "by row does not support"
        )
    return tensor


def _model_tensor(
    name: str,
    shape: tuple[int, ...],
    tensor: StoredTensor,
    place: TensorSource,
    numbers: Indices,
    spec: ModelSpec,
) -> StoredTensor:
    if len(shape) == 1 and (place.rows or place.offset):
        values = tensor.dequantise().reshape(-1) + np.float32(place.offset)
        if place.rows:
            values = values[place.rows(spec, numbers)]
        return StoredTensor.from_floats(name, values)
    if place.slab:
        tensor = tensor.take(name, place.slab(spec, numbers))
    if place.transposed and not tensor.format.is_plain:
        tensor = StoredTensor.from_floats(name, tensor.dequantise().T)
    elif place.transposed:
        tensor = tensor.transposed()
    if place.first_row:
        return tensor.take(name, np.arange(place.first_row, tensor.rows))
    if place.rows is None:
        return replace(tensor, name=name, shape=shape)
    return tensor.take(name, place.rows(spec, numbers))
