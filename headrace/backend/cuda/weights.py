"""Weights in GPU memory, packed once. Weights that an op reads together are stacked if
their layouts are equal.
"""

from collections.abc import Mapping, Sequence

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.layout import WeightLayout, layout_of
from headrace.backend.cuda.packing import PackedWeight, pack, pack_vector
from headrace.program.fuse import LINEAR_OPS
from headrace.program.op import Op, Weight
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor


def read_wide(program: Program, tensors: Mapping[str, StoredTensor]) -> set[int]:
    """Ids of the values that are multiplied with weights wider than bf16. These values
    are float32.
    """

    def is_wide(op: Op) -> bool:
        return any(layout_of(tensors[weight.name]).is_wide for weight in op.matrices())

    return {op.x.id for op in program.ops if isinstance(op, LINEAR_OPS) and is_wide(op)}


def can_stack(tensors: Sequence[StoredTensor]) -> bool:
    """Whether matrices can be stacked: same layout, width and column order."""
    orders = {None if t.column_order is None else t.column_order.tobytes() for t in tensors}
    return (
        len({layout_of(t) for t in tensors}) == 1
        and len({t.cols for t in tensors}) == 1
        and len(orders) == 1
    )


class Weights:
    """Packs weights at first use. Programs over the same KV share them, by name."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = dict(tensors)
        self._matrices: dict[tuple[str, ...], PackedWeight] = {}
        self._vectors: dict[tuple[str | int, ...], torch.Tensor] = {}

    def add(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Add the tensors of another program. A known name keeps its tensor."""
        self.tensors = {**tensors, **self.tensors}

    def with_own(self, tensors: Mapping[str, StoredTensor]) -> "Weights":
        """These weights and further ones, which only the result has."""
        other = Weights({**self.tensors, **tensors})
        other._matrices, other._vectors = dict(self._matrices), dict(self._vectors)
        return other

    def matrix(self, weight: Weight) -> PackedWeight:
        return self._packed([weight])

    def try_stack(self, weights: Sequence[Weight]) -> PackedWeight | None:
        """Matrices stacked by rows; None if they differ in layout."""
        tensors = [self.tensors[weight.name] for weight in weights]
        return self._packed(weights) if can_stack(tensors) else None

    def stack(self, weights: Sequence[Weight]) -> PackedWeight:
        """Matrices stacked by rows, in float32 if they differ in layout."""
        try_stack = self.try_stack(weights)
        return try_stack if try_stack else self._packed(weights, WeightLayout("f32"))

    def vector(self, weight: Weight) -> torch.Tensor:  # [cols]
        return self.vectors([weight], [weight.cols])

    def vectors(self, weights: Sequence[Weight | None], sizes: Sequence[int]) -> torch.Tensor:
        """Concatenated float32 vectors, with zeros of the given size for a missing vector."""
        key = tuple(
            weight.name if weight else size for weight, size in zip(weights, sizes, strict=True)
        )
        if key not in self._vectors:
            parts = [
                pack_vector(self.tensors[weight.name])
                if weight
                else torch.zeros(size, device=DEVICE)
                for weight, size in zip(weights, sizes, strict=True)
            ]
            self._vectors[key] = torch.cat(parts)
        return self._vectors[key]

    def _packed(
        self, weights: Sequence[Weight], layout: WeightLayout | None = None
    ) -> PackedWeight:
        names = tuple(weight.name for weight in weights)
        if names not in self._matrices:
            packed = pack([self.tensors[name] for name in names], layout)
            whole_rows = sum(weight.whole_rows or weight.rows for weight in weights)
            self._matrices[names] = packed._replace(whole_rows=whole_rows)
        return self._matrices[names]
