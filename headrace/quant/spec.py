from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.quant.arrays import Floats
from headrace.quant.sparse import spread
from headrace.record import frozen

Number = Literal["u8", "f16", "bf16", "f32"]
"""bf16 is stored in uint16."""
ScaleType = Number | Literal["none", "e8m0", "3-bit", "4-bit", "6-bit", "8-bit"]
"""No scale, powers of two (e8m0), or integers of a super-block."""
Codebook = Literal[
    "integer",
    "e2m1",
    "e4m3",
    "e5m2",
    "bf16",
    "nf4",
    "fp4",
    "iq4_nl",
    "iq1",
    "iq2",
    "iq3_xxs",
    "iq3_s",
]

PLAIN: dict[str, Number] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
NUMBERS: dict[Number, np.dtype] = {
    "u8": np.dtype("u1"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "f32": np.dtype("<f4"),
}
_SCALE_BITS: dict[ScaleType, int] = {
    "none": 0,
    "u8": 8,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "e8m0": 8,
    "3-bit": 3,
    "4-bit": 4,
    "6-bit": 6,
    "8-bit": 8,
}

CODEBOOKS: dict[Codebook, tuple[float, ...]] = {
    # Quantiles of a normal distribution, and zero (QLoRA, Dettmers et al. 2023, appendix E).
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    # Sign, two bits of exponent, one of fraction, in bitsandbytes' order and scaled to 1.
    "fp4": tuple(
        sign * value / 12
        for sign in (1, -1)
        for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
    ),
    # OCP microscaling formats, 2023.
    "e2m1": (
        0.0,
        0.5,
        1.0,
        1.5,
        2.0,
        3.0,
        4.0,
        6.0,
        -0.0,
        -0.5,
        -1.0,
        -1.5,
        -2.0,
        -3.0,
        -4.0,
        -6.0,
    ),
    # ggml-common.h.
    "iq4_nl": (
        -127,
        -104,
        -83,
        -65,
        -49,
        -35,
        -22,
        -10,
        1,
        13,
        25,
        38,
        53,
        69,
        89,
        113,
    ),
    # Values of grid points in ggml-common.h, with both signs; of IQ1, -1, 0 and 1, each plus an
    # eighth, then minus an eighth.
    "iq2": (8, 25, 43, -8, -25, -43),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15),
    "iq1": (-0.875, 0.125, 1.125, -1.125, -0.125, 0.875),
}

FRACTION_BITS = {"e4m3": 3, "e5m2": 2}
"""Micikevicius et al. 2022."""

POWERS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
"""OCP microscaling formats, 2023."""


@frozen
class QuantSpec:
    """A quantised number format."""

    bits: int
    group: int
    """Columns that share a scale; 0 for a whole row."""
    scale: ScaleType = "f16"
    zero: Literal["none", "point", "minimum"] = "none"
    """The equation of a value:

    * none: scale * (code - 2^(bits - 1)), or scale * codebook[code];
    * point: scale * (code - zero point);
    * minimum: scale * code + minimum.
    """
    zero_type: Number | None = None
    """Type of zero points (u8) or minima that are stored as numbers."""
    codebook: Codebook = "integer"
    code_cols: int = 1
    """Columns per code; above 1, codes are grid points with signs."""
    super_block: int = 0
    """Columns whose integer scales share a float16."""
    has_wide_outliers: bool = False
    """Whether activations beyond 6 stay float32 (LLM.int8, Dettmers et al. 2022)."""
    is_sparse: bool = False
    """Whether two values of every four columns are kept, with a bit per column for their places
    (2:4, Mishra et al. 2021). All other values are 0.
    """

    @property
    def name(self) -> str:
        """For display: `int4 g128, f16`, `e4m3 by row, f32`, `int8 by row, f32, 2:4`."""
        code = f"int{self.bits}" if self.codebook == "integer" else self.codebook
        zero = {"none": "", "point": ", zero points", "minimum": ", minima"}[self.zero]
        scale = f" {f'g{self.group}' if self.group else 'by row'}, {self.scale}"
        sparsity = ", 2:4" if self.is_sparse else ""
        return f"{code}{'' if self.scale == 'none' else scale}{zero}{sparsity}"

    @property
    def values(self) -> NDArray[np.float32]:
        return code_values(self)

    @property
    def needs_floats(self) -> bool:
        return self.codebook in FRACTION_BITS or self.group == 16

    @property
    def needs_rows_in_int8(self) -> bool:
        """Whether kernels multiply it with int8 activations that have one scale per row."""
        return self.is_sparse and self.codebook == "integer" and self.bits == 8 and not self.group

    def num_scales(self, cols: int) -> int:
        if self.scale == "none":
            return 0
        return -(-cols // self.group) if self.group else 1

    def num_codes(self, cols: int) -> int:
        """Codes of a row of `cols` columns."""
        return (cols // 2 if self.is_sparse else cols) // self.code_cols

    def table_bytes(self, rows: int, cols: int) -> int:
        """Bytes of codes, places, scales and zeros of a matrix."""
        zero_bits = 0
        if self.zero_type:
            zero_bits = _SCALE_BITS[self.zero_type]
        elif self.zero == "minimum":
            zero_bits = _SCALE_BITS[self.scale]
        scale_bits = self.num_scales(cols) * (_SCALE_BITS[self.scale] + zero_bits)
        if self.super_block:
            scale_bits += 16 * (cols // self.super_block) * (2 if zero_bits else 1)
        code_bytes = -(-self.num_codes(cols) * self.bits // 8)
        place_bytes = -(-cols // 8) if self.is_sparse else 0
        return rows * (code_bytes + place_bytes + scale_bits // 8)


class TableRows(NamedTuple):
    """Rows of a matrix: codes, and the numbers that give them a value.

    Codes are uint16 for bf16, else uint8. If the format is sparse, only kept values have codes,
    in the order of their columns, and bit c % 8 of byte c // 8 of a row of `places` says whether
    the value of column c is kept.
    """

    codes: NDArray[Any]  # [rows, `QuantSpec.num_codes`]
    scales: NDArray[np.generic]  # [rows, scales of a row], in `QuantSpec.scale`
    zeros: NDArray[np.generic] | None = None  # [rows, scales of a row], in `QuantSpec.zero_type`
    places: NDArray[np.uint8] | None = None  # [rows, bytes of a row]


def floats(numbers: NDArray[np.generic], number: ScaleType | None) -> NDArray[np.float32]:
    if number == "bf16":
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers.astype(np.float32)


def encode_numbers(values: NDArray[np.float32], number: ScaleType | None) -> NDArray[np.generic]:
    if number == "bf16":
        bits = values.view(np.uint32)
        is_odd = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)).astype(np.uint16)
    if number == "f16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    return np.rint(values).astype(np.uint8) if number == "u8" else values.astype(np.float32)


def code_values(spec: QuantSpec) -> NDArray[np.float32]:
    codes = np.arange(1 << spec.bits)
    if spec.codebook == "integer":
        return (codes - (1 << spec.bits - 1 if spec.zero == "none" else 0)).astype(np.float32)
    if spec.codebook in CODEBOOKS:
        return np.array(CODEBOOKS[spec.codebook], np.float32)
    if spec.codebook == "bf16":
        return floats(codes, "bf16")
    return small_floats(FRACTION_BITS[spec.codebook])


def dequantise_rows(spec: QuantSpec, rows: TableRows) -> NDArray[np.float32]:  # [rows, cols]
    codes = floats(rows.codes, "bf16") if spec.codebook == "bf16" else spec.values[rows.codes]
    if rows.places is not None:
        codes = spread(codes, rows.places)
    if spec.scale == "none":
        return codes
    cols = codes.shape[1]
    group = spec.group or cols

    def by_column(numbers: NDArray[np.generic], number: ScaleType | None) -> Floats:
        return np.repeat(floats(numbers, number), group, axis=1)[:, :cols]

    scales = by_column(rows.scales, spec.scale)
    if rows.zeros is None:
        return codes * scales
    zeros = by_column(rows.zeros, spec.zero_type)
    return (codes - zeros) * scales if spec.zero == "point" else codes * scales + zeros


def small_floats(fraction_bits: int) -> NDArray[np.float32]:
    """All floats of 8 bits; e4m3 has only NaN at the end (`float8_e4m3fn`)."""
    codes = np.arange(256)
    exponent_bits = 7 - fraction_bits
    fraction, exponent = codes & ((1 << fraction_bits) - 1), (codes & 127) >> fraction_bits
    bias = (1 << exponent_bits - 1) - 1
    significand = np.where(exponent > 0, fraction + (1 << fraction_bits), fraction)
    magnitudes = np.ldexp(
        significand.astype(np.float32), np.maximum(exponent, 1) - bias - fraction_bits
    )
    if fraction_bits == FRACTION_BITS["e4m3"]:
        magnitudes[codes & 127 == 127] = np.nan
    else:
        is_special = exponent == (1 << exponent_bits) - 1
        magnitudes[is_special] = np.where(fraction[is_special] > 0, np.nan, np.inf)
    result: Floats = np.where(codes & 128, -magnitudes, magnitudes).astype(np.float32)
    return result
