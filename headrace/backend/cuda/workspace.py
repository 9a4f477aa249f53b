"""GPU memory for steps: values of a program, reused after their last use, and scratch."""

from collections.abc import Callable, Collection
from typing import TypeVar, cast

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.step_memory import value_places
from headrace.backend.cuda.step_shape import Rows
from headrace.program.op import Value
from headrace.program.trace import Program

_T = TypeVar("_T")


class Workspace:
    """Tensors by name, shared by programs that run in turn on one GPU.

    `grown` counts replaced tensors; launches bound to an old tensor are invalid.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._others: dict[str, object] = {}
        self.grown = 0

    def take(
        self, name: str, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:  # [rows, width]
        """Return scratch memory [rows, width] of this type; calls with the same name share it."""
        key = f"{name} {width} {dtype}"
        tensor = self._tensors.get(key)
        if tensor is None or len(tensor) < rows:
            self.grown += tensor is not None
            tensor = self._tensors[key] = torch.zeros(rows, width, dtype=dtype, device=DEVICE)
        return tensor[:rows]

    def once(self, key: str, make: Callable[[], _T]) -> _T:
        if key not in self._others:
            self._others[key] = make()
        return cast(_T, self._others[key])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())


class Buffers:
    """Workspace tensor of each value of a program. Values reuse the tensors of dead values."""

    def __init__(self, program: Program, packed: torch.dtype, wide: Collection[int]) -> None:
        self._packed, self._wide = packed, wide
        self.places = value_places(program, self.dtype)

    def bind(self, workspace: Workspace, rows: Rows) -> Callable[[Value], torch.Tensor]:
        """A function from a value to its tensor, [rows, width]."""
        return lambda value: workspace.take(
            self.places[value.id], rows[value.rows], value.width, self.dtype(value)
        )

    def dtype(self, value: Value) -> torch.dtype:
        """The multiply type if only linear ops read the value and it is not wide; else
        float32.
        """
        return self._packed if value.packed and value.id not in self._wide else torch.float32
