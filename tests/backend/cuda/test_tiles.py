"""Tiles of products for each kind of GPU, and the ranges of columns that decide the bits."""

import pytest
import torch

from headrace.backend.cuda.architecture import A100, B200, H100, L4, RTX_5090, Architecture
from headrace.backend.cuda.kernels import tiles
from headrace.backend.cuda.kernels.tiles import splits_for, stage_bytes, tile_for
from headrace.backend.cuda.layout import layout_of
from tests.backend.cuda.hollow import hollow_tensor
from tests.backend.cuda.matrices import FORMAT_NAMES
from tests.tables import KINDS

FORMATS = [name for name in FORMAT_NAMES if name not in KINDS]
SHAPES = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (2048, 2048)]
"""Weights of Llama 3.1 8B, and one of Llama 3.2 1B: [rows, columns]."""
KINDS_OF_ACTIVATIONS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
]
"""The type that is multiplied, and the type in memory."""


def on(gpu: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "is_interpreting", lambda: False)
    monkeypatch.setattr(tiles, "architecture", lambda: gpu)


@pytest.mark.parametrize("gpu", [A100, L4, H100, B200, RTX_5090], ids=lambda gpu: gpu.capability)
def test_stages_fit_into_the_shared_memory_of_a_program(
    gpu: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(gpu, monkeypatch)
    for name in FORMATS:
        layout = layout_of(hollow_tensor("w", name, (256, 256)))
        for dtype, stored in KINDS_OF_ACTIVATIONS:
            for rows, cols in SHAPES:
                splits = splits_for(rows, cols, layout, dtype)
                for num_rows in (1, 16, 33, 64, 100, 128, 256, 512, 2048, 8192):
                    tile = tile_for(
                        num_rows, rows, cols, layout, dtype, splits=splits, stored=stored
                    )
                    stage = stage_bytes(tile, layout, dtype, stored)
                    size = tile.num_stages * tile.unroll * stage
                    assert size <= gpu.shared_bytes and tile.num_stages >= 2, (name, num_rows, tile)
                    if gpu.has_wgmma and dtype == torch.bfloat16 and layout.store != "f32":
                        # four warps multiply 64 rows of the weight together
                        assert tile.block_n % 64 == 0 and tile.num_warps % 4 == 0


@pytest.mark.parametrize(
    ("name", "expected"), [("Q4_0", [2, 2, 1, 4, 4]), ("BF16", [1, 1, 1, 4, 1])]
)
def test_narrow_weights_are_cut_into_ranges(
    name: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(H100, monkeypatch)
    layout = layout_of(hollow_tensor("w", name, (256, 256)))
    assert [splits_for(*shape, layout, torch.bfloat16) for shape in SHAPES] == expected
    rows, cols = SHAPES[3]
    few, many = (
        tile_for(num_rows, rows, cols, layout, torch.bfloat16, splits=expected[3])
        for num_rows in (1, 2048)
    )
    assert few.is_parallel and not many.is_parallel
