"""Matrices packed by GPTQModel 7.7.0 and AutoAWQ 0.2.9, which do not install beside this torch on a CPU, and what these make of them.

`tests/data/gptq.safetensors`: `TorchLinear.pack_original` and `dequantize_weight` with the scales in float32, 64 columns in groups of 32,
in order and permuted, zero points from 0 on; `convert_gptq_v2_to_v1_format_module` gave the older checkpoint format.
`tests/data/awq.safetensors`: `WQLinear_GEMM.from_linear` and `dequantize_gemm`, likewise.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.safetensors import read_safetensors

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("order", ["", "_order"])
@pytest.mark.parametrize("version", ["", "_v2"])
def test_gptqmodel(bits: int, order: str, version: str) -> None:
    name, path = f"bits{bits}{order}{version}", DATA / "gptq.safetensors"
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": f"gptq{version}"}
    tensors = {key: tensor for key, tensor in read_safetensors(path).items() if key.startswith(f"{name}.")}
    matrix = method_of(config).assemble(config, tensors, "here")[f"{name}.weight"]
    assert np.array_equal(matrix.dequantise(), load_file(path)[f"bits{bits}{order}.want"])
    assert matrix.format.has_column_order == bool(order)


@pytest.mark.parametrize("group", [32, 64])
def test_autoawq(group: int) -> None:
    name, path = f"group{group}", DATA / "awq.safetensors"
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    tensors = {key: tensor for key, tensor in read_safetensors(path).items() if key.startswith(f"{name}.")}
    matrix = method_of(config).assemble(config, tensors, "here")[f"{name}.weight"]
    assert np.array_equal(matrix.dequantise(), load_file(path)[f"{name}.want"])
