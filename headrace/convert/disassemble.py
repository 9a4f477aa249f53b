"""The way back from tensors under our names to those of a file: what `checkpoint/assemble.py` does,
undone.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.assemble import located, stored_shapes
from headrace.model.family import Layout, Rows
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

Floats = NDArray[np.float32]


@frozen(eq=False)
class Share:
    """One of our tensors as a part of a stored one."""

    name: str
    """Ours."""
    rows: Rows
    """The stored rows that have its rows, in their order; the entries, of a vector."""
    plus: float = 0.0
    """What is added to the stored numbers of a vector."""
    columns: Rows | None = None
    """Of a matrix that is stored transposed: the stored columns that have its rows; `rows` then
    have its columns.
    """


@frozen(eq=False)
class Stored:
    """A tensor that a file of a model has."""

    shape: tuple[int, ...]
    """[rows, cols], or the length of one that holds vectors."""
    shares: tuple[Share, ...]
    """Ours that it holds, which together take each row once."""

    @property
    def is_transposed(self) -> bool:
        return any(share.columns is not None for share in self.shares)

    def values(self, tensors: Mapping[str, StoredTensor], first: int, last: int) -> Floats:
        """The stored rows from `first` to `last` [rows, cols], made of our tensors; of a vector all
        of it, whatever the rows.
        """
        if len(self.shape) == 1:
            vector = np.empty(self.shape, np.float32)
            for share in self.shares:
                vector[share.rows] = tensors[share.name].dequantise().reshape(-1) - np.float32(
                    share.plus
                )
            return vector
        if self.is_transposed:
            return self._transposed(tensors)[first:last]
        result = np.empty((last - first, self.shape[1]), np.float32)
        for share in self.shares:
            mine = np.flatnonzero((share.rows >= first) & (share.rows < last))
            if len(mine):
                result[share.rows[mine] - first] = tensors[share.name].dequantise_rows(mine)
        return result

    def _transposed(self, tensors: Mapping[str, StoredTensor]) -> Floats:
        result = np.empty(self.shape, np.float32)
        for share in self.shares:
            assert share.columns is not None
            result[np.ix_(share.rows, share.columns)] = tensors[share.name].dequantise().T
        return result


def disassembled(spec: ModelSpec, layout: Layout, names: Iterable[str] = ()) -> dict[str, Stored]:
    """The tensors of a file of a model by the file's names; `names` are those that are known to be
    in it, where it is there already.
    """
    layout = layout.of(set(names))
    places, sizes = located(spec, layout), stored_shapes(spec, layout)
    shares: defaultdict[str, list[Share]] = defaultdict(list)
    for name, (shape, place, numbers) in places.items():
        count = shape[-1] if len(shape) == 1 else shape[0]
        rows = place.rows(spec, numbers) if place.rows else np.arange(count)
        if place.transposed:
            across = place.slab(spec, numbers) if place.slab else np.arange(shape[1])
            share = Share(name, across, columns=rows)
        else:
            share = Share(name, place.slab(spec, numbers)[rows] if place.slab else rows, place.plus)
        shares[place.name].append(share)
    return {name: Stored(sizes[name], tuple(parts)) for name, parts in shares.items()}
