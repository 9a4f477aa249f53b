"""Random matrices of a layout, made on the device, for measurements."""

import torch

from headrace.backend.cuda import packing
from headrace.backend.cuda.layout import SUPER_BLOCK, ScaleStore, WeightLayout
from headrace.backend.cuda.packing import PackedWeight


def random_weight(layout: WeightLayout, rows: int, cols: int, device: torch.device) -> PackedWeight:
    """A matrix of a layout that keeps the norm of rows near 1."""
    kind = packing.word_type(layout)
    codes = torch.empty(rows, layout.row_bytes(cols) // kind.itemsize, dtype=kind, device=device)
    if layout.scale is None:
        codes.normal_(0, cols**-0.5)
    else:
        codes.view(torch.uint8).random_(0, 120 if layout.store in ("e4m3", "e5m2") else 256)
    groups, largest = layout.num_groups(cols), {"int4": 8, "int8": 128}.get(layout.store, 448)

    def table(number: ScaleStore | None, factor: float) -> torch.Tensor | None:
        if number in ("steps", "eighths"):
            units = (
                factor / 32 * (0.5 + torch.rand(rows, -(-cols // SUPER_BLOCK), device=device))
            ).to(torch.float16)
            return packing.super_block_table(
                units, torch.randint(16, 48, (rows, groups), dtype=torch.int8, device=device)
            ).contiguous()
        numbers = packing.empty_table(layout, number, rows, cols)
        if numbers is not None:
            numbers.copy_(factor * (0.5 + torch.rand(numbers.shape, device=device)))
        return packing.as_words(numbers)

    scale = cols**-0.5 / largest
    zeros = table(layout.zero_store, scale if layout.zero == "minimum" else 1.0)
    lookup = (
        torch.tensor(layout.lookup, dtype=torch.float32, device=device) if layout.lookup else None
    )
    places = None
    if layout.is_sparse:
        places = torch.full(
            (layout.place_words(cols), rows), 0x33333333, dtype=torch.int32, device=device
        )
    return PackedWeight(
        layout=layout,
        rows=rows,
        cols=cols,
        codes=codes,
        scales=table(layout.scale, scale),
        zeros=zeros,
        lookup=lookup,
        places=places,
    )
