"""Folders of NVIDIA's Model Optimizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

from headrace.checkpoint.quantisation.modelopt import ModelOpt
from headrace.errors import FormatError, UnsupportedModelError
from tests.folders import assembled, check_engine, tiny_llama, write_folder

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
E4M3 = torch.float8_e4m3fn


def fours(name: str, value: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Random codes and scales in place of a matrix: values, and tensors."""
    rows, cols = value.shape
    generator = torch.Generator().manual_seed(rows * cols)
    codes = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, cols // 16, generator=generator) * 8 + 1).to(E4M3)
    second = torch.tensor(value.std().item() / 20)
    values = unpack_fp4_from_uint8(codes, rows, cols, torch.float32).reshape(rows, -1, 16)
    values = (values * (scales.float() * second)[:, :, None]).reshape(rows, cols)
    layer = name.removesuffix("weight")
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": second}
    tensors |= {"input_scale": torch.tensor(0.5)}
    return values, {layer + part: tensor for part, tensor in tensors.items()}


@pytest.mark.parametrize("has_file", [False, True])
def test_nvfp4_has_the_values_of_compressed_tensors(has_file: bool, tmp_path: Path) -> None:
    """Also with the configuration in a file of its own, as older versions write it."""
    model = tiny_llama(64, 96)
    config = NVFP4 | {"ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    write_folder(tmp_path, model, config, fours)
    if has_file:
        values = json.loads((tmp_path / "config.json").read_text())
        del values["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(values))
        theirs = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(theirs))
    check_engine(tmp_path, model)


WEIGHT = torch.linspace(-3, 3, 256 * 128).reshape(256, 128).to(E4M3)


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor(0.25),
        torch.rand(256, 1) + 0.5,
        torch.tensor([0.5, 2.0])[:, None],
        torch.tensor([0.5, 2.0]).reshape(2, 1, 1, 1),
        torch.randint(120, 130, (256, 4), dtype=torch.uint8),
    ],
    ids=["tensor", "row", "block", "block with sizes of 1", "powers of two"],
)
def test_fp8_values(scale: torch.Tensor, tmp_path: Path) -> None:
    tensors = {"x.weight": WEIGHT, "x.weight_scale": scale, "x.k_scale": torch.ones(1)}
    (found,) = assembled(tmp_path, NVFP4 | {"quant_algo": "FP8_PB_WO"}, tensors).values()
    factors = 2.0 ** (scale.float() - 127) if scale.dtype == torch.uint8 else scale
    if scale.numel() > 1:
        factors = factors.reshape(scale.shape[0], -1)
        factors = factors.repeat_interleave(256 // len(factors), 0)
        factors = factors.repeat_interleave(128 // factors.shape[1], 1)
    want = WEIGHT.float() * factors
    np.testing.assert_allclose(found.dequantise(), want.numpy(), rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "INT4", None, 4])
def test_other_algorithms_are_refused(algorithm: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quant_algo = {algorithm}"):
        ModelOpt().check(NVFP4 | {"quant_algo": algorithm})


CODES, SCALES = torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 4).to(E4M3)
GOOD = {"x.weight": CODES, "x.weight_scale": SCALES, "x.weight_scale_2": torch.ones(1)}
MALFORMED: dict[str, tuple[dict[str, torch.Tensor], type[Exception], str]] = {
    "no scale": ({"x.weight": CODES}, FormatError, "x.weight_scale is missing"),
    "no second scale": (
        {"x.weight": CODES, "x.weight_scale": SCALES},
        FormatError,
        "x.weight_scale_2 is missing",
    ),
    "two second scales": (GOOD | {"x.weight_scale_2": torch.ones(2)}, FormatError, "2 numbers"),
    "other groups": (
        GOOD | {"x.weight_scale": SCALES[:, :2].contiguous()},
        FormatError,
        "32 columns",
    ),
    "floats": (GOOD | {"x.weight_scale": torch.ones(8, 4)}, FormatError, "is F32"),
    "not finite": (
        GOOD | {"x.weight_scale_2": torch.tensor([torch.inf])},
        FormatError,
        "not finite",
    ),
    "AWQ": (GOOD | {"x.pre_quant_scale": torch.ones(64)}, UnsupportedModelError, "without AWQ"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_tensors(case: str, tmp_path: Path) -> None:
    tensors, error, message = MALFORMED[case]
    with pytest.raises(error, match=message):
        assembled(tmp_path, NVFP4, tensors)
