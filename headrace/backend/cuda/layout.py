"""Layout of weights on the GPU: codes, scales and zeros, chosen from the stored format."""

from dataclasses import replace
from math import gcd
from typing import Literal

from headrace.quant.formats import Format, StoredTensor
from headrace.quant.spec import CODEBOOKS, QuantSpec
from headrace.record import frozen

Store = Literal["f32", "f16", "bf16", "e4m3", "e5m2", "int8", "int4"]
# Storage of scales and zeros: floats, or 8-bit integers, or eighths, that multiply a
# float16 super-scale
ScaleStore = Literal["f32", "f16", "bf16", "steps", "eighths"]

_PLAIN: dict[str, Store] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_BYTES: dict[str, int] = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "int8": 1}
# Storage that holds each type exactly
_SCALES: dict[str | None, ScaleStore] = {"f16": "f16", "bf16": "bf16", "e8m0": "bf16", "u8": "f16"}
SUPER_BLOCK = 256  # Columns that share a float16 super-scale
_IN_EIGHTHS = ("iq1", "iq2", "iq3_xxs")  # Codebooks whose sub-scales are eighths


@frozen
class WeightLayout:
    """Layout of a matrix in GPU memory.

    Rows are contiguous, padded to whole tiles of `tile` columns. A 16-bit word of `int4`
    packs one code from each quarter of its tile, and a word of `int8` one from each half,
    128 more than it is. The first is in the lowest bits, so kernels unpack words without a
    move between threads. Rows of `rows_in_int8` are plain bytes. Scales are [groups,
    rows]; packing.py describes scales of 8 and 16 bits.
    """

    store: Store
    tile: int = 64  # Columns of a row that a kernel reads at once
    # Columns that share a scale: a divisor or a multiple of the tile; 0: the whole row
    group: int = 0
    scale: ScaleStore | None = None
    # scale * code, scale * (code - zero point), or scale * code + minimum
    zero: Literal["none", "point", "minimum"] = "none"
    zero_store: ScaleStore | None = None
    offset: int = 0  # Added to each stored code
    lookup: tuple[float, ...] = ()  # The values of codes, if codes are looked up
    # int8 activations per row: sums of integer products are exact
    rows_in_int8: bool = False
    # Whether activations above 6 stay floats (LLM.int8, Dettmers et al. 2022)
    outliers: bool = False
    # 2:4: codes are those of the kept values, laid out as `kept`. A word of 32 bits has the
    # places of 32 columns, a bit for each, and words are [words of a row, rows].
    is_sparse: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether numbers have more digits than bf16; activations are then float32."""
        return self.store in ("f32", "f16")

    @property
    def name(self) -> str:
        """All that kernels of a product depend on, as in a tile table: `int4 group 32 f16`."""
        words: list[str] = [self.store]
        if self.scale:
            words += [f"group {self.group}", self.scale]
        if self.zero_store:
            words += [self.zero, self.zero_store]
        if self.lookup:
            is_e2m1 = self.lookup == CODEBOOKS["e2m1"]
            words.append("e2m1" if is_e2m1 else "looked up")
        if self.rows_in_int8:
            words.append("rows in int8")
        if self.outliers:
            words.append("outliers")
        if self.is_sparse:
            words.append("2:4")
        return " ".join(words)

    @property
    def planes(self) -> int:
        """Codes in a stored word, each of another part of the tile."""
        if self.store == "int4":
            return 4
        return 2 if self.store == "int8" and not self.rows_in_int8 else 1

    @property
    def kept(self) -> "WeightLayout":
        """Layout of the kept values of a 2:4 matrix, which have half of its columns."""
        return replace(self, tile=self.tile // 2, group=self.group // 2, is_sparse=False)

    @property
    def part(self) -> int:
        """Columns of a plane: stored words of a tile."""
        return self.tile // self.planes

    def padded_cols(self, cols: int) -> int:
        return -(-cols // self.tile) * self.tile

    def row_bytes(self, cols: int) -> int:
        if self.is_sparse:
            return self.kept.row_bytes(cols // 2)
        cols = self.padded_cols(cols)
        return cols // 2 if self.store == "int4" else cols * _BYTES[self.store]

    def place_words(self, cols: int) -> int:
        """32-bit words per row with the places of 2:4 weights."""
        return self.padded_cols(cols) // 32 if self.is_sparse else 0

    def num_groups(self, cols: int) -> int:
        return -(-self.padded_cols(cols) // self.group) if self.group else 1

    def table_words(self, number: ScaleStore, cols: int) -> int:
        """32-bit words per row of a table of scales or zeros."""
        groups = self.num_groups(cols)
        if number == "f32":
            return groups
        if number in ("f16", "bf16"):
            return -(-groups // 2)
        return -(-groups // 4) + -(-cols // SUPER_BLOCK)

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a matrix with its scales and zeros."""
        tables = sum(
            self.table_words(number, cols) for number in (self.scale, self.zero_store) if number
        )
        words = tables + self.place_words(cols)
        return rows * (self.row_bytes(cols) + 4 * words) + 4 * len(self.lookup)


def layout_of(tensor: StoredTensor) -> WeightLayout:
    """GPU layout of a stored tensor: lossless, with the same bits per code or the next size."""
    form, spec = tensor.format, tensor.format.spec
    is_sparse = spec is not None and spec.is_sparse
    if form.is_bf16:
        return WeightLayout("bf16", is_sparse=is_sparse)
    if form.name in _PLAIN:
        return WeightLayout(_PLAIN[form.name])
    if form.needs_rows_in_int8:
        assert spec
        return WeightLayout(
            store="int8",
            tile=128,
            group=0,
            scale="f32",
            rows_in_int8=True,
            outliers=spec.has_wide_outliers,
            is_sparse=is_sparse,
        )
    if spec is None or not (form.split or form.table_rows or form.name.startswith("MXFP4")):
        return WeightLayout("f32")
    return _quantised(form, spec)


def _quantised(form: Format, spec: QuantSpec) -> WeightLayout:
    is_looked_up = spec.codebook in CODEBOOKS and spec.code_cols == 1
    store: Store
    offset = 0
    if spec.codebook == "e4m3":
        store, is_looked_up = "e4m3", False
    elif spec.codebook == "e5m2":
        store, is_looked_up = "e5m2", False
    elif spec.bits <= 4 and spec.code_cols == 1:
        store = "int4"
        if not is_looked_up and spec.zero == "none":
            offset = -8 if form.split else -(1 << spec.bits - 1)
    else:
        store = "int8"
        if spec.zero != "none":
            offset = 128

    return _grouped(
        WeightLayout(
            store=store,
            tile=128,
            group=spec.group,
            scale=_scale_store(spec, spec.scale),
            zero=spec.zero,
            zero_store=None if spec.zero == "none" else _scale_store(spec, spec.zero_type),
            offset=offset,
            lookup=tuple(CODEBOOKS[spec.codebook]) if is_looked_up else (),
            is_sparse=spec.is_sparse,
        )
    )


def _scale_store(spec: QuantSpec, number: str | None) -> ScaleStore:
    if spec.super_block:
        return "eighths" if spec.codebook in _IN_EIGHTHS else "steps"
    return _SCALES.get(number, "f32")


def _grouped(layout: WeightLayout) -> WeightLayout:
    # Scales repeat if groups do not end at tile boundaries.
    if not layout.group or layout.group % layout.tile == 0:
        return layout
    return replace(layout, group=gcd(layout.group, layout.tile))
