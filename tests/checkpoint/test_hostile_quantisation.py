"""Parts of quantised tensors of random type and shape: an error of ours, or a readable
tensor.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import FormatError, UnsupportedModelError
from tests.checkpoint import test_bitsandbytes as bnb
from tests.checkpoint import test_compressed_tensors_kinds as ct
from tests.checkpoint import test_fp8 as fp8
from tests.folders import assembled

NVFP4 = {
    "x.weight_packed": torch.ones(8, 32, dtype=torch.uint8),
    "x.weight_global_scale": torch.ones(1),
}
BYTES = torch.ones(8, 64, dtype=torch.int8)
FP8 = torch.ones(8, 64).to(torch.float8_e4m3fn)
CASES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "packed": (ct.config(4), ct.TestMalformed.TENSORS | {"x.weight_g_idx": torch.arange(64) // 32}),
    "int8": (
        ct.config(8, strategy="block", block_structure=[4, 32]),
        {
            "x.weight": BYTES,
            "x.weight_scale": torch.ones(2, 2),
            "x.weight_zero_point": torch.ones(2, 2).char(),
        },
    ),
    "fours": (
        ct.config(4, type="float"),
        NVFP4 | {"x.weight_scale": torch.ones(8, 4).to(torch.float8_e4m3fn)},
    ),
    "float8": (
        fp8.FP8 | {"weight_block_size": [4, 32]},
        {"x.weight": FP8, "x.weight_scale_inv": torch.ones(2, 2)},
    ),
    "MLX": (
        {"quant_method": "mlx", "bits": 4, "group_size": 32},
        {
            "x.weight": torch.ones(8, 8, dtype=torch.uint32),
            "x.scales": torch.ones(8, 2),
            "x.biases": torch.ones(8, 2),
        },
    ),
    "MLX, powers of two": (
        {"quant_method": "mlx", "bits": 4, "group_size": 32, "mode": "mxfp4"},
        {
            "x.weight": torch.ones(8, 8, dtype=torch.uint32),
            "x.scales": torch.ones(8, 2, dtype=torch.uint8),
        },
    ),
    "Model Optimizer": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            "x.weight": torch.ones(8, 32, dtype=torch.uint8),
            "x.weight_scale": torch.ones(8, 4).to(torch.float8_e4m3fn),
            "x.weight_scale_2": torch.ones(1),
        },
    ),
    "Model Optimizer, 8 bits": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"x.weight": FP8, "x.weight_scale": torch.ones(8, 1)},
    ),
    "nf4": (bnb.FOUR, bnb.TestMalformed.TENSORS | bnb.NESTED | bnb.TestMalformed().state()),
    "LLM.int8": (
        bnb.EIGHT,
        {"x.weight": BYTES, "x.SCB": torch.ones(8), "x.weight_format": torch.tensor(0)},
    ),
}
TYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint32,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("case", CASES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dtype=st.sampled_from(TYPES),
    shape=st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 256]), max_size=3),
    is_kept=st.booleans(),
    value=st.sampled_from([0, 1, 7, 255]),
    data=st.data(),
)
def test_any_part(
    case: str,
    dtype: torch.dtype,
    shape: list[int],
    is_kept: bool,
    value: int,
    data: st.DataObject,
    tmp_path: Path,
) -> None:
    """One part has another type, and perhaps another shape."""
    config, tensors = CASES[case]
    name = data.draw(st.sampled_from(sorted(tensors)))
    part = torch.full(tensors[name].shape if is_kept else shape, value).to(dtype)
    try:
        found = assembled(tmp_path, config, tensors | {name: part})
    except (FormatError, UnsupportedModelError) as error:
        assert "x." in str(error)
        return
    for tensor in found.values():
        assert tensor.dequantise().shape == tensor.shape
        if tensor.format.table_rows and np.isfinite(tensor.dequantise()).all():
            rows = tensor.format.table_rows(tensor.parts, slice(0, 3))
            assert rows.codes.shape == (min(3, tensor.rows), tensor.cols)
