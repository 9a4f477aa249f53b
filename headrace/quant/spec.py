"""What a quantised number format is: one record for all of them, and the values of its codes."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.record import frozen

Number = Literal["u8", "f16", "bf16", "f32"]
"""How the numbers of a table are stored; bf16 as its 16 bits, in uint16."""
ScaleType = Number | Literal["e8m0", "3-bit", "4-bit", "6-bit", "8-bit"]
"""Of scales: numbers of their own, powers of two, or integers of so many bits, with a scale for
those of a super-block.
"""
Codebook = Literal[
    "integer", "e2m1", "e4m3", "e5m2", "nf4", "fp4", "iq4_nl", "iq1", "iq2", "iq3_xxs", "iq3_s"
]

PLAIN: dict[str, Number] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
"""The numbers that files of every kind have, by the names of their formats."""
NUMBERS: dict[Number, np.dtype] = {
    "u8": np.dtype("u1"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "f32": np.dtype("<f4"),
}
_SCALE_BITS: dict[ScaleType, int] = {
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
    # The quantiles of a normal distribution, with a zero of its own (QLoRA, Dettmers et al. 2023,
    # appendix E).
    "nf4": (
        *(
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
        ),
        *(
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
        ),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    # Sign, two bits of exponent and one of fraction, as bitsandbytes has them: its largest is 1.
    "fp4": tuple(
        sign * value / 12
        for sign in (1, -1)
        for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
    ),
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
    ),  # OCP microscaling formats, 2023
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
    ),  # ggml-common.h
    # Magnitudes of grid points there, then the same below 0; in IQ1 -1, 0, 1 and an eighth more, or
    # less.
    "iq2": (*(8, 25, 43), *(-8, -25, -43)),
    "iq3_xxs": (*(4, 12, 20, 28, 36, 44, 52, 62), *(-4, -12, -20, -28, -36, -44, -52, -62)),
    "iq3_s": (*(1, 3, 5, 7, 9, 11, 13, 15), *(-1, -3, -5, -7, -9, -11, -13, -15)),
    "iq1": (*(-0.875, 0.125, 1.125), *(-1.125, -0.125, 0.875)),
}
"""The values of codes that are looked up, or those that points of a grid are made of."""

FRACTION_BITS = {"e4m3": 3, "e5m2": 2}
"""Of small floats (Micikevicius et al. 2022)."""

POWERS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
"""What the codes of e8m0 stand for [256]: powers of two, the last of them NaN (OCP microscaling
formats, 2023).
"""


@frozen
class QuantSpec:
    """A quantised format: what a code is, and what it is scaled with."""

    bits: int
    """Of a code."""
    group: int
    """Columns of a row that share a scale; 0: all."""
    scale: ScaleType = "f16"
    zero: Literal["none", "point", "minimum"] = "none"
    """A value is scale * (code - zero point), scale * code + minimum, or, with neither, scale *
    (code - 2^(bits - 1)).
    """
    zero_type: Number | None = None
    """How zero points (u8) or minima are stored, where they are numbers of their own."""
    codebook: Codebook = "integer"
    """What a code stands for; the zero of anything but integers is 0."""
    point: int = 1
    """Columns that a code stands for: more than one are a point of a grid, or two, with their
    signs.
    """
    super_block: int = 0
    """Columns whose scales are integers with a float16 in common; minima are integers alike, below
    0, with a float16 of their own.
    """
    has_wide_outliers: bool = False
    """Whether activations beyond 6 stay float32, while the others of their row are int8 by row
    (LLM.int8, Dettmers et al. 2022).
    """

    @property
    def name(self) -> str:
        """What people call it: int4 g128, nf4 g64, e4m3 by row."""
        code = f"int{self.bits}" if self.codebook == "integer" else self.codebook
        zero = {"none": "", "point": ", zero points", "minimum": ", minima"}[self.zero]
        return f"{code} {f'g{self.group}' if self.group else 'by row'}, {self.scale}{zero}"

    @property
    def values(self) -> NDArray[np.float32]:
        """What each code stands for [2^bits], or a column of a point may, before it is scaled."""
        return code_values(self)

    @property
    def needs_floats(self) -> bool:
        """Whether no kernel for tables has an integer product: small floats, and groups of fewer
        columns than those of activations.
        """
        return self.codebook in FRACTION_BITS or self.group == 16

    def num_scales(self, cols: int) -> int:
        """Scales of a row of so many columns."""
        return -(-cols // self.group) if self.group else 1

    def table_bytes(self, rows: int, cols: int) -> int:
        """Bytes of codes, scales and zeros, without padding."""
        zero = (
            _SCALE_BITS[self.zero_type]
            if self.zero_type
            else _SCALE_BITS[self.scale]
            if self.zero == "minimum"
            else 0
        )
        scales = self.num_scales(cols) * (_SCALE_BITS[self.scale] + zero)
        common = 16 * (cols // self.super_block) * (2 if zero else 1) if self.super_block else 0
        return rows * (-(-cols * self.bits // (8 * self.point)) + (scales + common) // 8)


class TableRows(NamedTuple):
    """Some rows of a matrix, code by code."""

    codes: NDArray[np.uint8]  # [rows, cols]
    scales: NDArray[np.generic]  # [rows, scales of a row], as `QuantSpec.scale` has them
    zeros: NDArray[np.generic] | None = None  # the same, as `QuantSpec.zero_type` has them


def floats(numbers: NDArray[np.generic], number: ScaleType | None) -> NDArray[np.float32]:
    """Numbers of a table as float32."""
    if number == "bf16":
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers.astype(np.float32)


def encode_numbers(values: NDArray[np.float32], number: ScaleType | None) -> NDArray[np.generic]:
    """Floats as numbers of a table, rounded to the nearest; those beyond float16 become its
    largest.
    """
    if number == "bf16":
        bits = values.view(np.uint32)
        return (
            (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        ).astype(np.uint16)
    if number == "f16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    return np.rint(values).astype(np.uint8) if number == "u8" else values.astype(np.float32)


def code_values(spec: QuantSpec) -> NDArray[np.float32]:
    """`QuantSpec.values`; NaN and infinities of small floats as such."""
    codes = np.arange(1 << spec.bits)
    if spec.codebook == "integer":
        return (codes - (1 << spec.bits - 1 if spec.zero == "none" else 0)).astype(np.float32)
    if spec.codebook in CODEBOOKS:
        return np.array(CODEBOOKS[spec.codebook], np.float32)
    return small_floats(FRACTION_BITS[spec.codebook])


def dequantise_rows(spec: QuantSpec, rows: TableRows) -> NDArray[np.float32]:  # [rows, cols]
    """The values of rows, in float32: the difference of code and zero point is taken before it is
    scaled.
    """
    cols = rows.codes.shape[1]
    group = spec.group or cols

    def spread(numbers: NDArray[np.generic], number: ScaleType | None) -> NDArray[np.float32]:
        return np.repeat(floats(numbers, number), group, axis=1)[:, :cols]

    codes, scales = spec.values[rows.codes], spread(rows.scales, spec.scale)
    if rows.zeros is None:
        return codes * scales
    zeros = spread(rows.zeros, spec.zero_type)
    return (codes - zeros) * scales if spec.zero == "point" else codes * scales + zeros


def small_floats(fraction_bits: int) -> NDArray[np.float32]:
    """All floats of 8 bits with so many for the fraction; e4m3 has no infinities, and one NaN
    (`float8_e4m3fn`).
    """
    codes = np.arange(256)
    exponent_bits = 7 - fraction_bits
    fraction, exponent = codes & ((1 << fraction_bits) - 1), (codes & 127) >> fraction_bits
    bias = (1 << exponent_bits - 1) - 1
    whole = np.where(exponent > 0, fraction + (1 << fraction_bits), fraction)
    magnitudes = np.ldexp(whole.astype(np.float32), np.maximum(exponent, 1) - bias - fraction_bits)
    top = (1 << exponent_bits) - 1
    if fraction_bits == FRACTION_BITS["e4m3"]:
        magnitudes[codes & 127 == 127] = np.nan
    else:
        magnitudes[exponent == top] = np.where(fraction[exponent == top] > 0, np.nan, np.inf)
    result: NDArray[np.float32] = np.where(codes & 128, -magnitudes, magnitudes).astype(np.float32)
    return result
