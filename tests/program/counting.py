"""Arrays that count their multiply-adds, their element-wise operations and the memory cells
used.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headrace.backend.reference.activations import erfc

COMPARISONS = {np.equal, np.not_equal, np.isfinite, np.invert, np.logical_and}
FREE = {np.negative} | COMPARISONS
MOVING = {
    np.argsort,
    np.concatenate,
    np.empty_like,
    np.nonzero,
    np.repeat,
    np.sort,
    np.take_along_axis,
    np.unique,
    np.where,
}
"""Functions that only compare or move numbers."""
ELEMENTWISE = {
    *(np.add, np.subtract, np.multiply, np.true_divide, np.maximum, np.minimum),
    *(np.exp, np.sqrt, np.sin, np.cos, np.tanh, erfc),
}
"""Functions that count one operation for each number of the result, or of the operand of a
reduction. Integers do not count, because they are indices.
"""


class Memory:
    """An array, with marks for the cells that were read and written."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = np.ascontiguousarray(values)
        self.was_read, self.was_written = (np.zeros(self.values.shape, bool) for _ in range(2))

    def holds(self, array: NDArray[Any]) -> bool:
        return (
            array.size > 0 and 0 <= array.ctypes.data - self.values.ctypes.data < self.values.nbytes
        )

    def cells(self, marks: NDArray[np.bool_], view: NDArray[Any]) -> NDArray[np.bool_]:
        """The marks of the cells of a view, in the shape of the view."""
        size = self.values.itemsize
        first = (view.ctypes.data - self.values.ctypes.data) // size
        return as_strided(
            marks.reshape(-1)[first:], view.shape, [stride // size for stride in view.strides]
        )


class Tally:
    """The counts."""

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self.clear()

    def clear(self) -> None:
        self.multiply_adds = 0
        self.single = 0
        """Element-wise operations, without operations on one number per row."""
        for memory in self.memories:
            memory.was_read[...] = memory.was_written[...] = False

    def counted(self, values: NDArray[Any]) -> "Counted":
        """The same array as a counting array."""
        array = values.view(Counted)
        array.tally, array.memory = self, None
        return array

    def memory(self, values: NDArray[Any]) -> tuple["Counted", Memory]:
        """The same array as a counting array with marks."""
        memory = Memory(values)
        self.memories.append(memory)
        array = self.counted(memory.values)
        array.memory = memory
        return array, memory


def read(arrays: Sequence[Any]) -> None:
    """Mark the cells that these arrays are views of as read."""
    for array in arrays:
        if isinstance(array, Counted) and (memory := array.home):
            memory.cells(memory.was_read, array)[...] = True


class Counted(np.ndarray):
    """An array that counts every operation on it. An unknown operation raises an error."""

    tally: Tally
    memory: Memory | None = None
    """The memory that it is a view or a copy of."""

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, Counted):
            self.tally, self.memory = source.tally, source.memory

    @property
    def home(self) -> Memory | None:
        """The memory that it is a view of."""
        return self.memory if self.memory and self.memory.holds(self) else None

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Any, ...] = (), **options: Any
    ) -> Any:
        tally, operands = self.tally, [plain(x) for x in inputs]
        read(inputs)
        targets = {"out": tuple(map(plain, out))} if out else {}
        result = np.asarray(getattr(ufunc, method)(*operands, **targets, **options))
        if ufunc is np.matmul:
            tally.multiply_adds += result.size * operands[0].shape[-1]
        elif ufunc in ELEMENTWISE:
            width = operands[0] if method == "reduce" else result
            tally.single += (
                width.size if width.ndim and width.shape[-1] > 1 and result.dtype.kind != "i" else 0
            )
        elif ufunc not in FREE:
            raise NotImplementedError(ufunc)
        return tally.counted(result)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.einsum:
            return self._einsum(*args)
        if function not in MOVING | {np.mean, np.put_along_axis}:
            raise NotImplementedError(function)
        result = super().__array_function__(function, types, args, kwargs)
        if result is None or isinstance(result, tuple):
            return result
        return self.tally.counted(np.asarray(result))

    def _einsum(self, formula: str, *operands: Any) -> "Counted":
        """An einsum counts one multiply-add for each choice of its indices."""
        read(operands)
        letters = formula.partition("->")[0].split(",")
        sizes = {
            name: size
            for names, array in zip(letters, operands, strict=True)
            for name, size in zip(names, array.shape, strict=True)
        }
        self.tally.multiply_adds += int(np.prod(list(sizes.values())))
        return self.tally.counted(np.asarray(np.einsum(formula, *map(plain, operands))))

    def __getitem__(self, index: Any) -> Any:
        result, memory = super().__getitem__(index), self.home
        if (
            memory and result.home is None
        ):  # a copy: its cells have been read; a view is read where it is used
            memory.cells(memory.was_read, self)[index] = True
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        read([value])
        if memory := self.home:
            memory.cells(memory.was_written, self)[index] = True
        np.asarray(self)[index] = plain(value)


def plain(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, Counted) else x
