"""Adapters: low-rank matrices (LoRA, Hu et al. 2021), and weights of their own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UnsupportedModelError
from headrace.program.moe import Experts
from headrace.program.op import Op, Weight
from headrace.program.ops import Embed, Linear
from headrace.program.trace import Program, Tracer
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.spec import encode_numbers
from headrace.record import frozen

_BF16_BYTES = 2
_CHUNK_NUMBERS = 1 << 24
_HEAD = "head"


Floats = NDArray[np.float32]


class LowRank(NamedTuple):
    """Adds scale * x @ down.T @ up.T to the product x @ weight.T of a weight [rows, cols]."""

    down: Floats  # [rank, cols]
    up: Floats  # [rows, rank]
    scale: float


class TokenRows(NamedTuple):
    """Rows of an embedding, in place of the model's."""

    indices: NDArray[np.int64]  # [tokens]
    values: Floats  # [tokens, cols]


@frozen(eq=False)
class OwnWeight:
    """A weight of the adapter's own, made from the model's weight in the order of these fields."""

    values: StoredTensor | None = None
    """In place of the model's weight."""
    rows: TokenRows | None = None
    delta: LowRank | None = None
    """scale * up @ down is added."""
    added: Floats | None = None  # [size] of a vector
    row_norms: Floats | None = None  # [rows]
    """The length of each row (DoRA, Liu et al. 2024)."""
    col_norms: Floats | None = None  # [cols]
    """The length of each column, of an embedding (DoRA)."""

    @property
    def or_none(self) -> "OwnWeight | None":
        """None if it changes nothing."""
        return None if self._is_whole and self.values is None else self

    def keeps(self, base: StoredTensor | None) -> bool:
        """Whether the weight is the model's own. PEFT saves unchanged embeddings."""
        if not self._is_whole or self.values is None or base is None:
            return False
        parts = (base.format.name, base.shape, self.values.format.name, self.values.shape)
        return parts[:2] == parts[2:] and np.array_equal(
            base.dequantise(), self.values.dequantise()
        )

    @property
    def _is_whole(self) -> bool:
        changes = (self.rows, self.delta, self.added, self.row_norms, self.col_norms)
        return not any(part is not None for part in changes)

    def make(self, name: str, base: StoredTensor | None) -> StoredTensor:
        """The weight; float32 if the model's weight is, else bf16. `base` None: zeros."""
        tensor = self.values or base
        if tensor is not None and self._is_whole:
            return replace(tensor, name=name)
        if self.added is not None:
            values = 0 if tensor is None else tensor.dequantise().reshape(-1)
            return StoredTensor.from_floats(name, values + self.added)
        assert tensor is not None, f"{name} has no base"
        whole = np.concatenate(
            [self._changed(tensor, rows) for rows in _row_ranges(tensor.rows, tensor.cols)]
        )
        if self.col_norms is not None:
            whole *= self.col_norms / _lengths(whole, axis=0)
        return _plain(name, whole, tensor.format.name == "F32")

    def _changed(self, tensor: StoredTensor, rows: NDArray[np.int64]) -> Floats:
        values = tensor.dequantise_rows(rows).reshape(len(rows), -1)
        if self.rows is not None:
            first, last = int(rows[0]), int(rows[-1])
            here = (self.rows.indices >= first) & (self.rows.indices <= last)
            values[self.rows.indices[here] - first] = self.rows.values[here]
        if self.delta is not None:
            down, up, scale = self.delta
            values = values + np.float32(scale) * (up[rows] @ down)
        if self.row_norms is not None:
            values = values * (self.row_norms[rows] / _lengths(values, axis=1))[:, None]
        return values


Adapter = Mapping[str, LowRank | OwnWeight]
"""Changes by the name of the weight.

If the head is tied to the embedding, low-rank matrices of `embed` change the head. A weight
`embed` of the adapter's own changes the embedding alone, and `head` the head.
"""


def low_rank_part(adapter: Adapter) -> dict[str, LowRank]:
    return {name: change for name, change in adapter.items() if isinstance(change, LowRank)}


def own_weights(
    program: Program, adapter: Adapter, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The adapter's own weights, made from the model's `tensors`."""
    tied = _tied_head(program)
    made = {}
    for name, change in adapter.items():
        if isinstance(change, OwnWeight):
            base = tensors.get(tied if tied and name == _HEAD else name)
            if not change.keeps(base):
                made[name] = change.make(name, base)
    for op in program.ops:
        if isinstance(op, Experts):
            made |= _in_one_format([weight.name for weight in op.matrices()], made, tensors)
    return made


def _in_one_format(
    names: Sequence[str], made: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """More own weights of experts, in the format of the others: they multiply the same rows."""
    if made.keys().isdisjoint(names):
        return {}
    current = {name: made.get(name) or tensors[name] for name in names}
    formats = {tensor.format.name for tensor in current.values()}
    if len(formats) == 1:
        return {}
    is_wide = "F32" in formats
    return {
        name: _plain(name, tensor.dequantise(), is_wide)
        for name, tensor in current.items()
        if tensor.format.name != ("F32" if is_wide else "BF16")
    }


def _plain(name: str, values: Floats, is_wide: bool) -> StoredTensor:
    """A tensor in float32 or bf16."""
    if is_wide:
        return StoredTensor.from_floats(name, values)
    words = encode_numbers(values, "bf16").reshape(-1).view(np.uint8)
    return StoredTensor.from_bytes(name, FORMATS["BF16"], values.shape, words)


def adapter_bytes(adapter: Adapter) -> int:
    """Bytes of the numbers of an adapter, as they were read."""
    total = 0
    for change in adapter.values():
        own = OwnWeight(delta=change) if isinstance(change, LowRank) else change
        arrays = [own.added, own.row_norms, own.col_norms, *(own.rows or ())]
        arrays += own.delta[:2] if own.delta else ()
        total += sum(array.nbytes for array in arrays if array is not None)
        total += own.values.nbytes if own.values else 0
    return total


def with_own_weights(program: Program, own: Mapping[str, StoredTensor]) -> Program:
    """The program with the adapter's own weights, under the names of `own_name`.

    `program` is traced, not fused. Biases that the model does not have are added to their linear
    ops. Raises FormatError for other shapes than the program's, UnsupportedModelError for a weight
    that no op has.
    """
    named = {own_name(name): tensor for name, tensor in own.items()}
    tracer, tied = Tracer(named), _tied_head(program)

    def weight(old: Weight, name: str) -> Weight:
        return tracer.weight(own_name(name), old.rows, old.cols) if name in own else old

    def new_bias(matrix: Weight) -> Weight | None:
        name = f"{matrix.name.removesuffix(_OWN)}_bias"
        return tracer.vector(own_name(name), matrix.rows) if name in own else None

    def changed(op: Op) -> Op:
        if isinstance(op, Linear) and op.weight.name == tied:
            bias = op.bias and weight(op.bias, op.bias.name)
            return replace(op, weight=weight(op.weight, _HEAD), bias=bias)
        op = op.with_weights({old.name: weight(old, old.name) for old in op.weights()})
        if isinstance(op, Linear) and op.bias is None:
            return replace(op, bias=new_bias(op.weight))
        return op

    result = replace(program, ops=tuple(map(changed, program.ops)))
    if unused := sorted(named.keys() - result.weights.keys()):
        raise UnsupportedModelError(
            f"the adapter has {unused[0].removesuffix(_OWN)}, which the model does not "
            "use; load the model that it was trained for"
        )
    return result


_OWN = " of the adapter"


def own_name(name: str) -> str:
    return name + _OWN


def adapted(program: Program, adapter: Adapter) -> Program:
    """The program whose rows all use the adapter, with its bytes in bf16."""
    weights = program.weights
    for name, change in adapter.items():
        weight = weights.get(name)
        if weight is None:
            continue
        if isinstance(change, LowRank):
            nbytes = weight.nbytes + _BF16_BYTES * (change.down.size + change.up.size)
        else:
            nbytes = _BF16_BYTES * weight.rows * weight.cols
        weights[name] = replace(weight, nbytes=nbytes)
    return program.with_weights(weights)


def _tied_head(program: Program) -> str | None:
    """The weight of the head, and of the head at an early exit, if it is an embedding too."""
    embeddings = {op.weight.name for op in program.ops if isinstance(op, Embed)}
    if program.logits is None:
        return None
    name = program.head().weight.name
    return name if name in embeddings else None


def _lengths(values: Floats, axis: int) -> Floats:
    lengths: Floats = np.sqrt(np.square(values).sum(axis=axis, dtype=np.float32))
    return lengths


def _row_ranges(rows: int, cols: int) -> Iterator[NDArray[np.int64]]:
    step = max(1, _CHUNK_NUMBERS // cols)
    for first in range(0, rows, step):
        yield np.arange(first, min(first + step, rows))
