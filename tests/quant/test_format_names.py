"""Parsing of format names."""

import pytest

from headrace.errors import RequestError
from headrace.quant.format_names import named_format
from headrace.quant.spec import QuantSpec

NAMES = {
    "int4-g128": QuantSpec(4, 128),
    "int4": QuantSpec(4, 128),
    "int2-g16-asym": QuantSpec(bits=2, group=16, scale="f16", zero="point", zero_type="u8"),
    "int8-row": QuantSpec(8, 0),
    "nf4": QuantSpec(4, 64, "f32", codebook="nf4"),
    "iq4_nl": QuantSpec(4, 32, codebook="iq4_nl"),
    "e4m3": QuantSpec(8, 0, "f32", codebook="e4m3"),
    "e5m2-g128": QuantSpec(8, 128, "f32", codebook="e5m2"),
}


@pytest.mark.parametrize(("name", "spec"), NAMES.items())
def test_named_formats(name: str, spec: QuantSpec) -> None:
    assert named_format(name) == spec


@pytest.mark.parametrize(
    "name",
    ["int5", "int4-g48", "int4-g0", "int4-", "nf4-asym", "", "q4_0", "int4-g128-sym", "e4m3-g17"],
)
def test_unknown_format_names(name: str) -> None:
    with pytest.raises(RequestError):
        named_format(name)
