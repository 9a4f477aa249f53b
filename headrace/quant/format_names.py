"""Formats by the names that people call them: int4-g128, int4-g32-asym, int8-row, w8a8, llm-int8,
nf4-g64, e4m3-row.
"""

import re

from headrace.errors import RequestError
from headrace.quant.spec import Codebook, QuantSpec

_NAME = re.compile(r"(int[2348]|nf4|fp4|iq4_nl|e4m3|e5m2)(?:-(row|g\d{1,6}))?(-asym)?")
_GROUPS = {"nf4": 64, "fp4": 64, "iq4_nl": 32, "e4m3": 0, "e5m2": 0}
_DEFAULT_GROUP = 128
_CODEBOOKS: dict[str, Codebook] = {
    "nf4": "nf4",
    "fp4": "fp4",
    "iq4_nl": "iq4_nl",
    "e4m3": "e4m3",
    "e5m2": "e5m2",
}

W8A8 = QuantSpec(8, 0, "f32")
"""Weights of 8 bits by row, which are multiplied with activations of 8 bits by row: those of others
have scales of 32 columns.
"""
LLM_INT8 = QuantSpec(8, 0, "f32", has_wide_outliers=True)
"""The same, where activations that are outliers stay float32."""

_BY_ROW = {"w8a8": W8A8, "llm-int8": LLM_INT8}

NAMES = (
    "w8a8, llm-int8, or int2, int3, int4, int8, nf4, fp4, iq4_nl, e4m3, e5m2; then -g and "
    "the columns of a group, or -row; then -asym for "
    "integers"
)
"""What a name is made of, for messages."""


def named_format(name: str) -> QuantSpec:
    """The format of this name. Scales are float16, those of nf4, fp4 and small floats float32;
    `-asym` has zero points.

    Raises RequestError for a name that is none, or a group that no kernel has: 16, or a multiple of
    32.
    """
    if name in _BY_ROW:
        return _BY_ROW[name]
    found = _NAME.fullmatch(name)
    if not found:
        raise RequestError(f"{name[:40]!r} is no format to quantise to; one is made of {NAMES}")
    kind, width, asymmetric = found.groups()
    group = (
        _GROUPS.get(kind, _DEFAULT_GROUP)
        if width is None
        else 0
        if width == "row"
        else int(width[1:])
    )
    if (group not in (0, 16) and group % 32) or width == "g0":
        raise RequestError(f"{name}: groups have 16 columns, or a multiple of 32")
    if not kind.startswith("int"):
        if asymmetric:
            raise RequestError(f"{name}: only integers have zero points")
        return QuantSpec(
            8 if kind.startswith("e") else 4,
            group,
            "f16" if kind == "iq4_nl" else "f32",
            codebook=_CODEBOOKS[kind],
        )
    return QuantSpec(
        int(kind[3:]), group, "f16", "point" if asymmetric else "none", "u8" if asymmetric else None
    )
