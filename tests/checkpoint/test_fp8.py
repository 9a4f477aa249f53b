"""Floats of 8 bits by tensor, row and block, read and computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.backend.cpu.packing import add_weight
from headrace.checkpoint.folder import open_folder
from headrace.errors import FormatError, UnsupportedModelError
from tests.folders import assembled, check_engine, tiny_llama, write_folder

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
WHOLE = FP8 | {"weight_block_size": None, "activation_scheme": "static"}
FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head"],
}
FLOATS = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])


def random_floats(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """All codes, with 0 in place of NaN and infinities."""
    values = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, (rows, cols)).astype(np.uint8)
    ).view(dtype)
    return values.float().nan_to_num(0, 0, 0).to(dtype)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    block=st.sampled_from([None, (128, 128), (64, 32), (1, 128)]),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e8m0fnu]),
    dtype=FLOATS,
)
def test_values(
    rows: int,
    cols: int,
    block: tuple[int, int] | None,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    values, rng = random_floats(rows, cols, dtype, rows), np.random.default_rng(cols)
    high, wide = block or (1, cols)
    scale_dtype = scale_dtype if block else torch.float32
    scale = torch.from_numpy(rng.uniform(0.1, 1, (-(-rows // high), -(-cols // wide)))).to(
        scale_dtype
    )
    config = FP8 | {"weight_block_size": list(block) if block else None}
    found = assembled(
        tmp_path,
        config,
        {"x.weight": values, "x.weight_scale_inv": scale, "x.activation_scale": torch.ones(1)},
    )
    by_number = (
        scale.float().repeat_interleave(high, dim=0)[:rows].repeat_interleave(wide, dim=1)[:, :cols]
    )
    want = (values.float() * by_number).numpy()
    assert found.keys() == {"x.weight"}
    assert np.array_equal(found["x.weight"].dequantise(), want)
    some = rng.permutation(rows)[:7]
    assert np.array_equal(found["x.weight"].take("y", some).dequantise(), want[some])


@pytest.mark.parametrize("shape", [(), (1,), (20,), (20, 1)])
@pytest.mark.parametrize("name", ["x.weight_scale", "x.weight_scale_inv"])
def test_scales_by_tensor_or_row(shape: tuple[int, ...], name: str, tmp_path: Path) -> None:
    values, scale = random_floats(20, 30, torch.float8_e4m3fn, 1), torch.rand(shape)
    parts = {
        "x.weight": values,
        name: scale,
        "x.input_scale": torch.ones(()),
        "x.input_scale_ub": torch.ones(1),
    }
    for config in (WHOLE, FP8, FBGEMM):
        found = assembled(tmp_path, config, parts)
        assert found.keys() == {"x.weight"}
        assert np.array_equal(
            found["x.weight"].dequantise(), (values.float() * scale.reshape(-1, 1)).numpy()
        )


@pytest.mark.parametrize(
    ("dtype", "code", "is_nan"),
    [
        ("float8_e4m3fn", 0x7F, True),
        ("float8_e4m3fn", 0xFF, True),
        ("float8_e5m2", 0x7D, True),
        ("float8_e5m2", 0x7C, False),
    ],
)
def test_what_is_not_finite_is_named_on_its_way_to_the_kernels(
    dtype: str, code: int, is_nan: bool, tmp_path: Path
) -> None:
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[7, 5] = code
    parts = {"x.weight": codes.view(getattr(torch, dtype)), "x.weight_scale": torch.ones(1)}
    weight = assembled(tmp_path, WHOLE, parts)["x.weight"]
    values = weight.dequantise()
    assert np.isnan(values[7, 5]) if is_nan else np.isposinf(values[7, 5])
    assert np.isfinite(values).sum() == values.size - 1
    with pytest.raises(
        UnsupportedModelError, match=rf"tensor x\.weight: .*{dtype[7:11]} is not finite"
    ):
        add_weight(_native.Plan("", 1), weight)


@pytest.mark.parametrize("config", [FP8, FP8 | {"weight_block_size": [32, 64]}, WHOLE, FBGEMM])
def test_the_engine_computes_them(config: dict[str, Any], tmp_path: Path) -> None:
    block = config.get("weight_block_size")

    def stored(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows, cols = weight.shape
        high, wide = block or ((1, cols) if config is FBGEMM else (rows, cols))
        padded = torch.nn.functional.pad(weight, (0, -cols % wide, 0, -rows % high))
        scale = (
            padded.reshape(-(-rows // high), high, -(-cols // wide), wide).abs().amax(dim=(1, 3))
            / 448
        )
        by_number = scale.repeat_interleave(high, dim=0)[:rows].repeat_interleave(wide, dim=1)[
            :, :cols
        ]
        codes = (weight / by_number).to(torch.float8_e4m3fn)
        suffix = "_scale_inv" if config is FP8 else "_scale"
        return codes.float() * by_number, {
            name: codes,
            name + suffix: scale.reshape(()) if config is WHOLE else scale,
        }

    model = tiny_llama(64, 160)
    write_folder(tmp_path, model, config, stored)
    checkpoint = check_engine(tmp_path, model, near=0.005)
    assert checkpoint.tensors["layers.1.gate"].format.spec.codebook == "e4m3"


class TestMalformed:
    @pytest.mark.parametrize(
        ("scale", "error", "message"),
        [
            (
                None,
                FormatError,
                r"x\.weight is F8_E4M3, but x\.weight_scale_inv and x\.weight_scale are missing",
            ),
            (
                torch.ones(2, 3),
                FormatError,
                r"x\.weight_scale_inv has shape \[2, 3\]; the scales of a matrix \[256, "
                r"256\]",
            ),
            (torch.ones(3), FormatError, r"x\.weight_scale_inv has shape \[3\]"),
            (torch.ones(2, 2, dtype=torch.int32), FormatError, r"x\.weight_scale_inv is I32"),
            (
                torch.full((2, 2), torch.inf),
                FormatError,
                r"x\.weight_scale_inv has a number that is not finite",
            ),
            (
                torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
                FormatError,
                "not finite",
            ),
            (
                torch.ones(256, 32),
                UnsupportedModelError,
                r"x\.weight_scale_inv has scales of 8 columns each",
            ),
        ],
    )
    def test_scales(
        self, scale: torch.Tensor | None, error: type[Exception], message: str, tmp_path: Path
    ) -> None:
        parts = {
            "x.weight": random_floats(256, 256, torch.float8_e4m3fn, 1),
            "x.weight_scale_inv": scale,
        }
        with pytest.raises(error, match=message):
            assembled(
                tmp_path, FP8, {name: part for name, part in parts.items() if part is not None}
            )

    def test_what_is_no_matrix(self, tmp_path: Path) -> None:
        parts = {
            "x.weight": torch.zeros(2, 3, 4).to(torch.float8_e4m3fn),
            "x.weight_scale": torch.ones(2, 3),
        }
        with pytest.raises(
            FormatError,
            match=r"x\.weight_scale has shape \[2, 3\]; the scales of a matrix \[2, 3, 4\]",
        ):
            assembled(tmp_path, FP8, parts)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"activation_scheme": "none"}, "activation_scheme = none"),
            ({"fmt": "int8"}, "fmt = int8"),
            ({"expert_dtype": "fp4"}, "expert_dtype = fp4"),
            ({"weight_block_size": [128]}, "weight_block_size"),
            ({"weight_block_size": [128, 0]}, "weight_block_size"),
            ({"weight_block_size": 128}, "weight_block_size = 128"),
        ],
    )
    def test_configurations(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        sizes = {
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        (tmp_path / "config.json").write_text(
            json.dumps(sizes | {"model_type": "llama", "quantization_config": FP8 | change})
        )
        with pytest.raises(
            UnsupportedModelError, match=f"quantization_config: {message}.*fp8 or fbgemm_fp8"
        ):
            open_folder(tmp_path)
