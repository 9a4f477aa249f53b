"""Random matrices of codes with table scales, of every kind that kernels read."""

from typing import Any

import numpy as np

from headrace.quant.formats import StoredTensor, plain_table
from headrace.quant.sparse import largest_two, places_of
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

SPARSE_KINDS = {
    "int8-row-2:4": QuantSpec(8, 0, "f32", is_sparse=True),
    "int8-2:4": QuantSpec(8, 32, "bf16", is_sparse=True),
    "int4-2:4": QuantSpec(4, 128, is_sparse=True),
    "int4-row-2:4": QuantSpec(4, 0, "f32", is_sparse=True),
    "bf16-2:4": QuantSpec(16, 0, "none", codebook="bf16", is_sparse=True),
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
    return random_codes((KINDS | SPARSE_KINDS)[kind], rows, cols, seed, name, scale, fill)


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
    code_shape, dtype = (rows, spec.num_codes(cols)), np.uint16 if spec.bits > 8 else np.uint8
    codes = (
        rng.integers(0, 1 << spec.bits, code_shape, dtype)
        if fill is None
        else np.full(code_shape, fill, dtype)
    )
    if spec.codebook == "bf16":
        values = rng.standard_normal(code_shape) * scale
        codes = _stored(values, "bf16") if fill is None else codes
    if spec.codebook != "bf16" and not np.isfinite(spec.values).all():
        codes[~np.isfinite(spec.values)[codes]] = 0
    size = float(np.abs(spec.values[codes]).max()) or 1.0
    shape = rows, spec.num_scales(cols)
    parts: dict[str, Any] = {"codes": codes}
    if spec.scale != "none":
        scales = rng.uniform(-2, 2, shape) * scale / size
        parts["scales"] = _stored(scales, spec.scale)  # type: ignore[arg-type]
    if spec.is_sparse:
        parts["places"] = places_of(largest_two(rng.random((rows, cols), np.float32)))
    if spec.zero_type == "u8":
        parts["zeros"] = rng.integers(0, 1 << spec.bits, shape, np.uint8)
    elif spec.zero_type:
        parts["zeros"] = _stored(rng.uniform(-1, 1, shape) * scale, spec.zero_type)
    return StoredTensor(name, plain_table(spec), (rows, cols), parts)


def _stored(values: Any, number: Number) -> Any:
    if number == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMBERS[number])
