"""Helpers for layers of several plain tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.quantisation.method import Config, Tensors, refusal
from headrace.errors import FormatError
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor
from headrace.quant.spec import NUMBERS, PLAIN, Number, floats

Words = NDArray[np.uint32]


def gathered(
    tensors: Tensors, parts: Sequence[str], matrix: Callable[[str], StoredTensor], where: str
) -> dict[str, StoredTensor]:
    layers = sorted(
        name.removesuffix(parts[0]) for name in tensors if name.endswith(f".{parts[0]}")
    )
    if both := [layer for layer in layers if f"{layer}weight" in tensors]:
        raise FormatError(
            f"{where}: tensors {both[0]}weight and {both[0]}{parts[0]} exclude each other"
        )
    part_names = {f"{layer}{part}" for layer in layers for part in parts}
    plain = {name: tensor for name, tensor in tensors.items() if name not in part_names}
    return plain | {f"{layer}weight": matrix(layer) for layer in layers}


def numbers(tensors: Tensors, name: str, dtype: str, dims: int, where: str) -> NDArray[Any]:
    """The numbers of a tensor as a view; I32 without sign. Raises FormatError."""
    tensor = tensors.get(name)
    if tensor is None or tensor.format.name != dtype or len(tensor.shape) != dims:
        state = f"is {tensor.format.name} {list(tensor.shape)}" if tensor else "is missing"
        raise FormatError(
            f"{where}: tensor {name} {state}, expected {dtype} with {dims} "
            f"dimension{'s' * (dims != 1)}"
        )
    kind = {"I32": "<u4", "I64": "<i8", "U8": "u1", "I8": "i1"}[dtype]
    return tensor.parts["codes"].view(kind).reshape(tensor.shape)


def finite_floats(tensors: Tensors, name: str, where: str) -> tuple[Number, NDArray[Any]]:
    """Raises FormatError."""
    tensor = tensors.get(name)
    if tensor is None or tensor.format.name not in PLAIN or len(tensor.shape) != 2:
        state = f"is {tensor.format.name} {list(tensor.shape)}" if tensor else "is missing"
        raise FormatError(f"{where}: tensor {name} {state}, expected floats with 2 dimensions")
    number = PLAIN[tensor.format.name]
    values = tensor.parts["codes"].view(NUMBERS[number]).reshape(tensor.shape)
    require_finite(floats(values, number), name, where)
    return number, values


def require_finite(values: Floats, name: str, where: str) -> None:
    if not np.isfinite(values).all():
        raise FormatError(f"{where}: tensor {name} has a number that is not finite")


def check_shapes(
    parts: Mapping[str, NDArray[Any]],
    expected: Mapping[str, tuple[int, ...]],
    layer: str,
    where: str,
) -> None:
    """Raises FormatError."""
    for part, shape in expected.items():
        if parts[part].shape != shape:
            raise FormatError(
                f"{where}: tensor {layer}{part} has shape {list(parts[part].shape)}, "
                f"expected {list(shape)}"
            )


def check_fields(config: Config, fields: Mapping[str, Sequence[Any]], supported: str) -> None:
    for field, known in fields.items():
        value = config.get(field)
        if not any(type(value) is type(other) and value == other for other in known):
            raise refusal(field, value, supported)


def check_group_size(config: Config, supported: str, field: str = "group_size") -> None:
    """Refuse groups other than -1 (whole rows), 16, and multiples of 32."""
    size = config.get(field)
    if type(size) is not int or not (size in (-1, 16) or (size > 0 and size % 32 == 0)):
        raise refusal(field, size, supported)


def group_of(cols: int, size: int, name: str, where: str) -> int:
    """Columns of a group; a whole row if `size` is -1 or larger. Raises FormatError."""
    group = cols if size == -1 else min(size, cols)
    if cols % group:
        raise FormatError(
            f"{where}: tensor {name} has {cols:,} columns, not a multiple of the group of {group}"
        )
    return group
