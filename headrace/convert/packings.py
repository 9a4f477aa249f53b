"""Which method's files have a format."""

from headrace.convert.bitsandbytes import BitsAndBytes, LlmInt8
from headrace.convert.compressed_tensors import CompressedTensors
from headrace.convert.packing import Packing
from headrace.quant.spec import QuantSpec


def packing_of(to: QuantSpec) -> Packing:
    """The writer of a format. Raises RequestError for one that no folder has."""
    if to.has_wide_outliers:
        return LlmInt8()
    return BitsAndBytes(to) if to.codebook in ("nf4", "fp4") else CompressedTensors(to)
