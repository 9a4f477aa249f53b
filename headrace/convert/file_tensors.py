"""Makes the tensors of a file from the model's tensors: the inverse of `checkpoint/assemble.py`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from headrace.checkpoint.assemble import locate_tensors, stored_shapes
from headrace.model.family import Layout, Rows
from headrace.model.spec import ModelSpec
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor
from headrace.record import frozen


@frozen(eq=False)
class TensorSlice:
    name: str
    rows: Rows
    """Rows or entries, in the model's order."""
    offset: float = 0.0
    """The loader adds it to the entries of a vector."""
    columns: Rows | None = None
    """Stored columns of a transposed matrix; `rows` hold the model's columns."""


@frozen(eq=False)
class FileTensor:
    shape: tuple[int, ...]
    """[rows, cols], or [entries]."""
    slices: tuple[TensorSlice, ...]

    @property
    def is_transposed(self) -> bool:
        return any(part.columns is not None for part in self.slices)

    def values(self, tensors: Mapping[str, StoredTensor], first: int, last: int) -> Floats:
        """Compute rows `first` to `last` [rows, cols]; of a vector, all of it."""
        if len(self.shape) == 1:
            vector = np.empty(self.shape, np.float32)
            for part in self.slices:
                entries = tensors[part.name].dequantise().reshape(-1)
                vector[part.rows] = entries - np.float32(part.offset)
            return vector
        if self.is_transposed:
            return self._transposed(tensors)[first:last]

        # Rows that no tensor of the model reads (`TensorSource.first_row`) are zeros.
        result = np.zeros((last - first, self.shape[1]), np.float32)
        for part in self.slices:
            rows = np.flatnonzero((part.rows >= first) & (part.rows < last))
            if len(rows):
                result[part.rows[rows] - first] = tensors[part.name].dequantise_rows(rows)
        return result

    def _transposed(self, tensors: Mapping[str, StoredTensor]) -> Floats:
        result = np.empty(self.shape, np.float32)
        for part in self.slices:
            assert part.columns is not None
            result[np.ix_(part.rows, part.columns)] = tensors[part.name].dequantise().T
        return result


def file_tensors(
    spec: ModelSpec, layout: Layout, names: Iterable[str] = ()
) -> dict[str, FileTensor]:
    layout = layout.for_names(set(names))
    places, shapes = locate_tensors(spec, layout), stored_shapes(spec, layout)
    slices: defaultdict[str, list[TensorSlice]] = defaultdict(list)
    for name, (shape, place, numbers) in places.items():
        count = shape[-1] if len(shape) == 1 else shape[0]
        rows = place.rows(spec, numbers) if place.rows else np.arange(count)
        if place.transposed:
            columns = place.slab(spec, numbers) if place.slab else np.arange(shape[1])
            part = TensorSlice(name, columns, columns=rows)
        else:
            rows = place.slab(spec, numbers)[rows] if place.slab else rows
            part = TensorSlice(name, rows + place.first_row, place.offset)
        slices[place.name].append(part)
    return {name: FileTensor(shapes[name], tuple(parts)) for name, parts in slices.items()}
