"""Bytes of the activations of a native plan, counted without one.

`BufferCounter` is told of the same buffers and reads as a plan (`Plan::reads` and `Plan::reserve`
in `csrc/plan.cpp`), and lays them out for a number of rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from headrace import _native
from headrace.backend.cpu.lowering import Lowering
from headrace.backend.cpu.packing import GROUP
from headrace.backend_traits import KvDtype
from headrace.program.adapter import LowRank
from headrace.program.op import RowKind, StepSize, Value, Weight
from headrace.program.trace import Program
from headrace.quant.formats import Format, StoredTensor
from headrace.quant.kv import is_rotated
from headrace.quant.spec import FRACTION_BITS

_Form = Literal["q8", "q8_offset", "q8_row", "q8_mixed", "bf16", "f32"]

_TILE_ROWS = 16
_LINE = 64
_OUTLIER_BYTES = 260
"""Of a row: a count, and 32 columns with their values."""
_ROW_HEADER_BYTES = 8


@dataclass
class _Buffer:
    width: int
    rows: RowKind
    packed: bool
    per_row: int = 1
    columns: int = 0
    """Padded to the units of the weights that are multiplied with it."""
    forms: set[_Form] = field(default_factory=set)

    def bytes(self, step: StepSize) -> int:
        rows = self.per_row * Value(0, self.width, self.rows).num_rows(step)
        sizes = [_form_bytes(form, self.columns) for form in self.forms]
        if not self.packed:
            sizes.append(4 * self.width)
        # A line between two arrays is free.
        return sum((rows * size + 2 * _LINE - 1) // _LINE * _LINE for size in sizes)


class BufferCounter:
    """Records the buffers of a native plan. Has the methods of a plan that concern them."""

    def __init__(self, program: Program, kv_dtype: KvDtype, isa: str, has_adapters: bool) -> None:
        self.buffers: list[_Buffer] = []
        self.weights: list[StoredTensor] = []
        self._groups = program.kv_groups
        self._quantises_kv = is_rotated(kv_dtype)
        self._has_bf16 = isa == "avx512bf16"
        self._has_adapters = has_adapters
        self._kv_widths: set[int] = set()
        self._expert_buffers: dict[tuple[object, ...], tuple[int, int]] = {}

    def bytes(self, step: StepSize) -> int:
        return sum(buffer.bytes(step) for buffer in self.buffers)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore all ops that add no buffer and multiply no weight."""
        return lambda *args, **named: None

    def add_buffer(self, width: int, rows: RowKind, packed: bool, per_row: int = 1) -> int:
        self.buffers.append(_Buffer(width=width, rows=rows, packed=packed, per_row=per_row))
        return len(self.buffers) - 1

    def rope_angles(self, frequencies: Sequence[float], scale: float, head_dim: int) -> int:
        return self.add_buffer(2 * (head_dim + _TILE_ROWS), "step", False)

    def linear(self, out: int, x: int, weight: int, bias: int, residual: int, offset: bool) -> None:
        self._read(x, weight, offset)

    def linear_activate(self, out: int, x: int, weight: int, bias: int, activation: str) -> None:
        self._read(x, weight, False)

    def glu_linear(self, out: int, x: int, gate: int, up: int, *further: object) -> None:
        self._read(x, gate, False)
        self._read(x, up, False)

    def qkv_rope_write(
        self,
        out: int,
        x: int,
        angles: int,
        weights: Sequence[int],
        biases: Sequence[int],
        layer: tuple[int, int],
    ) -> None:
        for weight in weights:
            self._read(x, weight, True)
        layout = self._groups[layer[0]].layout
        width = layout.num_heads * layout.key_dim
        if self._quantises_kv and width not in self._kv_widths:
            self._kv_widths.add(width)
            for _ in range(2):
                self.add_buffer(width, "step", False)

    def experts(
        self, out: int, x: int, routing: int, weights: Sequence[Sequence[int]], *further: object
    ) -> None:
        gates, ups, downs = weights
        rows, top_k = self.buffers[x].rows, self.buffers[routing].width // 2
        width, hidden = self.buffers[x].width, self.weights[gates[0]].rows
        shape = width, hidden, self.weights[downs[0]].rows, top_k, rows
        if shape not in self._expert_buffers:
            packed = self.add_buffer(width, rows, True, top_k)
            packed_hidden = self.add_buffer(hidden, rows, True, top_k)
            self.add_buffer(hidden, rows, False, top_k)
            self.add_buffer(shape[2], rows, False, top_k)
            self._expert_buffers[shape] = packed, packed_hidden
        packed, packed_hidden = self._expert_buffers[shape]
        for weight in (*gates, *ups):
            self._read(packed, weight, False, adapts=False)
        for weight in downs:
            self._read(packed_hidden, weight, False, adapts=False)

    def _read(self, buffer: int, weight: int, offset: bool, adapts: bool = True) -> None:
        format, cols = self.weights[weight].format, self.weights[weight].cols
        read, unit = self.buffers[buffer], max(_unit_columns(format), GROUP)
        read.columns = max(read.columns, -(-cols // unit) * unit)
        read.forms.add(self._form(format, offset))
        if adapts and self._has_adapters:
            read.forms.add("f32")

    def _form(self, format: Format, offset: bool) -> _Form:
        """The form of activations that kernels multiply a weight with (`form_for`)."""
        if format.needs_rows_in_int8:
            return "q8_mixed" if format.name == "I8_MIXED" else "q8_row"
        if format.quantised and not _is_float8(format):
            return "q8_offset" if offset else "q8"
        return "bf16" if format.is_bf16 and self._has_bf16 else "f32"


class _CountedLowering(Lowering):
    """Lowers a program to a counter, and reads no weight."""

    def weight(self, weight: Weight) -> int:
        counter = cast(BufferCounter, self.plan)
        if weight.name not in self.packed:
            counter.weights.append(self.tensors[weight.name])
            self.packed[weight.name] = len(counter.weights) - 1
        return self.packed[weight.name]

    def weight_pair(self, a: Weight, b: Weight) -> tuple[int, int]:
        return self.weight(a), self.weight(b)

    def vector(self, weight: Weight | None) -> int:
        return -1


def activation_bytes(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv_dtype: KvDtype,
    isa: str,
    has_adapters: bool = False,
) -> Callable[[StepSize], int]:
    """Count the activations of a lowered program.

    Returns the bytes by the most rows of each kind in any step.
    """
    counter = BufferCounter(program, kv_dtype, isa, has_adapters)
    places = {
        layer: (number, index)
        for number, group in enumerate(program.kv_groups)
        for index, layer in enumerate(group.layers)
    }
    plan: Any = counter
    _CountedLowering(cast(_native.Plan, plan), program, weights, places, None).lower()
    return counter.bytes


def _unit_columns(format: Format) -> int:
    """Columns of a unit of packed weights (`unit_columns` in `csrc/format.h`)."""
    if format.spec is None:
        return 1
    if format.spec.super_block and format.table_rows is None:
        return 256
    if format.name.startswith("MXFP4"):
        return 128
    return 64 if format.block > 1 and format.table_rows is None else GROUP


def _is_float8(format: Format) -> bool:
    return format.spec is not None and format.spec.codebook in FRACTION_BITS


def _form_bytes(form: _Form, columns: int) -> int:
    """Bytes of a row (`form_row_bytes` in `csrc/format.h`)."""
    match form:
        case "q8":
            return columns // GROUP * 48
        case "q8_offset":
            return columns // GROUP * 52
        case "q8_row":
            return columns + _ROW_HEADER_BYTES
        case "q8_mixed":
            return columns + _ROW_HEADER_BYTES + _OUTLIER_BYTES
        case "bf16":
            return 2 * columns
        case "f32":
            return 4 * columns


def low_rank_bytes(matrices: LowRank) -> int:
    """Bytes of the low-rank matrices for a weight, in bf16 (`csrc/adapters.h`)."""
    (rank, cols), rows = matrices.down.shape, len(matrices.up)
    rank_tiles, row_tiles = -(-rank // _TILE_ROWS), -(-rows // _TILE_ROWS)
    total: int = 2 * _TILE_ROWS * (rank_tiles * (cols + cols % 2) + row_tiles * rank)
    return total
