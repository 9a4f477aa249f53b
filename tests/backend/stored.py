"""Random tensors in every stored format, and the reference twins of activation packing."""

import numpy as np
from numpy.typing import NDArray

from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.kv import round_bf16
from headrace.quant.spec import small_floats

# Byte offsets of the float16 scales inside a block: any other bytes may be random.
_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    **dict.fromkeys(
        ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)
    ),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),  # in four pieces
}
_LARGEST = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), 166),
    **{"IQ3_XXS": 480, "IQ3_S": 465, "IQ4_NL": 127, "IQ4_XS": 4064, "TQ1_0": 1, "TQ2_0": 2},
}
"""Largest values of blocks with scale 1; 16 for all others."""


def random_stored(
    format_name: str,
    rows: int,
    cols: int,
    seed: int,
    name: str = "w",
    scale: float = 0.1,
    fill: int | None = None,
) -> StoredTensor:
    """A [rows, cols] tensor of random codes and scales, with values of the order of `scale`. With
    `fill`, all code bytes have this value.
    """
    rng = np.random.default_rng(seed)
    random_bytes = lambda shape: (  # noqa: E731
        rng.integers(0, 256, shape, np.uint8) if fill is None else np.full(shape, fill, np.uint8)
    )
    form = FORMATS[format_name]
    if "row_scales" in form.parts:
        codes = random_bytes(rows * cols)
        row_scales = (rng.uniform(-1, 1, rows) * scale / 64).astype(np.float32)
        return StoredTensor.from_bytes(name, form, (rows, cols), codes, row_scales=row_scales)
    if "MXFP4" in format_name:
        blocks = random_bytes((rows, cols // 32, form.nbytes))
        powers = (
            rng.integers(-5, 0, (rows, cols // 32), dtype=np.int64)
            + 127
            + round(float(np.log2(scale)))
        )
        if "block_scales" in form.parts:
            return StoredTensor.from_bytes(
                name, form, (rows, cols), blocks.reshape(-1), block_scales=powers.astype(np.uint8)
            )
        blocks[:, :, 0] = powers
        return StoredTensor.from_bytes(name, form, (rows, cols), blocks.reshape(-1))
    if format_name == "NVFP4":
        blocks = random_bytes((rows, cols // 64, form.nbytes))
        blocks[:, :, :4] = np.searchsorted(
            small_floats(3)[:127], rng.uniform(0, 1, (rows, cols // 64, 4)) * scale / 6
        )
        return StoredTensor.from_bytes(name, form, (rows, cols), blocks.reshape(-1))
    if format_name not in _SCALES:
        values = rng.standard_normal((rows, cols)).astype(np.float32) * np.float32(scale)
        if format_name == "F32":
            data = values.view(np.uint8)
        elif format_name == "F16":
            data = values.astype(np.float16).view(np.uint8)
        else:
            data = (
                (round_bf16(values).astype(np.float32).view(np.uint32) >> 16)
                .astype(np.uint16)
                .view(np.uint8)
            )
        return StoredTensor.from_bytes(name, form, (rows, cols), data.reshape(-1))
    blocks = random_bytes((rows * cols // form.block, form.nbytes))
    for at in _SCALES[format_name]:
        scales = (rng.uniform(-1, 1, len(blocks)) * scale / _LARGEST.get(format_name, 16)).astype(
            np.float16
        )
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if format_name == "IQ1_M":
        whole = (rng.uniform(-1, 1, len(blocks)) * scale / 16).astype(np.float16).view(np.uint16)
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | ((whole >> 4 * i) & 15) << 4
    return StoredTensor.from_bytes(name, form, (rows, cols), blocks.reshape(-1))


def quantised_rows(x: NDArray[np.float32], offset: bool, group: int = 32) -> NDArray[np.float64]:
    """The values of int8 activations: for each group of columns, 255 codes around 0 or around the
    middle of the range.
    """
    rows, cols = x.shape
    groups = np.pad(x, ((0, 0), (0, -cols % group))).reshape(rows, -1, group)
    high, low = groups.max(axis=2, keepdims=True), groups.min(axis=2, keepdims=True)
    half = np.float32(0.5)
    middle = half * (high + low) if offset else np.zeros_like(high)
    top = half * (high - low) if offset else np.maximum(high, -low)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint((groups - middle) * inverse).astype(np.float64)
    return (codes * (top / np.float32(127)) + middle).reshape(rows, -1)[:, :cols]
