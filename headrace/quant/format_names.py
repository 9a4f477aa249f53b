"""Names of formats, for example int4-g32-asym, int8-row, w8a8, nf4-g64."""

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

W8A8 = QuantSpec(bits=8, group=0, scale="f32")
"""int8 weights and activations by row."""
LLM_INT8 = QuantSpec(bits=8, group=0, scale="f32", has_wide_outliers=True)
"""W8A8 whose outlier activations stay float32."""

_BY_ROW = {"w8a8": W8A8, "llm-int8": LLM_INT8}

NAMES = (
    "w8a8, llm-int8, or TYPE[-gN | -row][-asym] with TYPE int2, int3, int4, int8, nf4, fp4, "
    "iq4_nl, e4m3 or e5m2, N columns in a group, and -asym for integers only; "
    "for example int4-g64"
)
"""The grammar, for messages."""


def named_format(name: str) -> QuantSpec:
    """Parse a name. Raises RequestError for an unknown name or group."""
    if name in _BY_ROW:
        return _BY_ROW[name]
    match = _NAME.fullmatch(name)
    if not match:
        raise RequestError(f"unknown format {name[:40]!r}; use {NAMES}")
    kind, width, asymmetric = match.groups()

    if width is None:
        group = _GROUPS.get(kind, _DEFAULT_GROUP)
    elif width == "row":
        group = 0
    else:
        group = int(width[1:])
    if (group not in (0, 16) and group % 32) or width == "g0":
        raise RequestError(
            f"format '{name}' has groups of {group} columns; use 16, a multiple of 32, or -row"
        )

    if not kind.startswith("int"):
        if asymmetric:
            raise RequestError(
                f"format '{name}' has zero points, which only integers can have; leave out -asym"
            )
        return QuantSpec(
            bits=8 if kind.startswith("e") else 4,
            group=group,
            scale="f16" if kind == "iq4_nl" else "f32",
            codebook=_CODEBOOKS[kind],
        )
    return QuantSpec(
        bits=int(kind[3:]),
        group=group,
        scale="f16",
        zero="point" if asymmetric else "none",
        zero_type="u8" if asymmetric else None,
    )
