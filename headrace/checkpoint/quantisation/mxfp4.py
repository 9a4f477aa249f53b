"""MXFP4 of gpt-oss: 4-bit floats, with a power of two for each 32 values.

`X_blocks` is uint8 [..., rows, blocks, 16], and `X_scales` uint8 [..., rows, blocks]. Its rows
are X's columns.
"""

from dataclasses import replace

from headrace.checkpoint.quantisation.method import Config, Tensors, refusal
from headrace.errors import FormatError
from headrace.quant.formats import FORMATS, StoredTensor

_METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"


class Mxfp4:
    """4-bit floats with shared powers of two (OCP microscaling formats, 2023)."""

    supported = f"{_METHOD} (gpt-oss)"

    def check(self, config: Config) -> None:
        if (dequantised := config.get("dequantize")) not in (None, False):
            raise refusal("dequantize", dequantised, self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        quantised = {name for name in tensors if name.endswith(_BLOCKS)}
        scales = {name.removesuffix(_BLOCKS) + _SCALES for name in quantised}
        return {
            name: _with_scales(name, tensors, where) if name in quantised else tensor
            for name, tensor in tensors.items()
            if name not in scales
        }


def _with_scales(name: str, tensors: Tensors, where: str) -> StoredTensor:
    blocks, scales = tensors[name], tensors.get(name.removesuffix(_BLOCKS) + _SCALES)
    if scales is None or {blocks.format.name, scales.format.name} != {"U8"}:
        raise FormatError(f"{where}: tensor {name} or its scales are missing or not bytes")
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise FormatError(
            f"{where}: tensor {name} and its scales have shapes {list(blocks.shape)} and "
            f"{list(scales.shape)}"
        )
    *_, count, _ = blocks.shape
    parts = {
        "codes": blocks.parts["codes"].reshape(-1, count, 16),
        "block_scales": scales.parts["codes"].reshape(-1, count),
    }
    return replace(
        blocks, format=FORMATS["MXFP4_PAIRS"], shape=(*blocks.shape[:-2], 32 * count), parts=parts
    )
