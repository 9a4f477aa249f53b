"""Random matrices of codes with table scales, of every kind that kernels read."""

from typing import Any

import numpy as np

from headrace.quant.formats import StoredTensor, plain_table
from headrace.quant.spec import NUMBERS, Number, QuantSpec

KINDS = {
    **{f"int{bits}": QuantSpec(bits, 32) for bits in (2, 3, 4, 8)},
    **{f"int{bits}-point": QuantSpec(bits, 128, "f16", "point", "u8") for bits in (2, 3, 4, 8)},
    "int4-minimum": QuantSpec(4, 64, "bf16", "minimum", "f32"),
    "int3-16": QuantSpec(3, 16, "f32", "point", "u8"),
    "int4-16": QuantSpec(4, 16),
    "int4-row": QuantSpec(4, 0, "bf16"),
    "int8-row": QuantSpec(8, 0, "f32"),
    "int4-256": QuantSpec(4, 256, "f32"),
    "nf4": QuantSpec(4, 64, "f32", codebook="nf4"),
    "fp4": QuantSpec(4, 64, "f32", codebook="fp4"),
    "iq4_nl": QuantSpec(4, 32, codebook="iq4_nl"),
    "e4m3": QuantSpec(8, 128, "f32", codebook="e4m3"),
    "e5m2-row": QuantSpec(8, 0, "bf16", codebook="e5m2"),
}


def random_table(
    kind: str,
    rows: int,
    cols: int,
    seed: int,
    name: str = "w",
    scale: float = 0.1,
    fill: int | None = None,
) -> StoredTensor:
    """Return a random [rows, cols] matrix with values of the order of `scale`.

    With `fill` all codes are `fill`.
    """
    return random_codes(KINDS[kind], rows, cols, seed, name, scale, fill)


def random_codes(
    spec: QuantSpec,
    rows: int,
    cols: int,
    seed: int,
    name: str = "w",
    scale: float = 0.1,
    fill: int | None = None,
) -> StoredTensor:
    """Return a random matrix in a format whose scales are plain numbers."""
    rng = np.random.default_rng(seed)
    codes = (
        rng.integers(0, 1 << spec.bits, (rows, cols), np.uint8)
        if fill is None
        else np.full((rows, cols), fill, np.uint8)
    )
    if not np.isfinite(spec.values).all():
        codes[~np.isfinite(spec.values)[codes]] = 0
    size = float(np.abs(spec.values[codes]).max()) or 1.0
    shape = rows, spec.num_scales(cols)
    parts: dict[str, Any] = {
        "codes": codes,
        "scales": _stored(rng.uniform(-2, 2, shape) * scale / size, spec.scale),
    }  # type: ignore[arg-type]
    if spec.zero_type == "u8":
        parts["zeros"] = rng.integers(0, 1 << spec.bits, shape, np.uint8)
    elif spec.zero_type:
        parts["zeros"] = _stored(rng.uniform(-1, 1, shape) * scale, spec.zero_type)
    return StoredTensor(name, plain_table(spec), (rows, cols), parts)


def _stored(values: Any, number: Number) -> Any:
    if number == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMBERS[number])
