"""Matrices packed and dequantised by GPTQModel 7.7.0, AutoAWQ 0.2.9 and hqq 0.2.8,
which do not install next to this torch on a CPU.

`tests/data/gptq.safetensors`: `TorchLinear.pack_original` and `dequantize_weight` with
float32 scales, 64 columns in groups of 32, in order and permuted, zero points from 0
on; the older checkpoint format by `convert_gptq_v2_to_v1_format_module`.
`tests/data/awq.safetensors`: `WQLinear_GEMM.from_linear` and `dequantize_gemm`.
`tests/data/hqq.safetensors`: `HQQLinear.state_dict` and `HQQLinear.dequantize` in
float32, and a layer with axis 0.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.safetensors import read_safetensors
from headrace.errors import UnsupportedModelError
from headrace.quant.formats import StoredTensor

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("order", ["", "_order"])
@pytest.mark.parametrize("version", ["", "_v2"])
def test_gptqmodel(bits: int, order: str, version: str) -> None:
    name, path = f"bits{bits}{order}{version}", DATA / "gptq.safetensors"
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "checkpoint_format": f"gptq{version}",
    }
    tensors = {
        key: tensor for key, tensor in read_safetensors(path).items() if key.startswith(f"{name}.")
    }
    matrix = method_of(config).assemble(config, tensors, "here")[f"{name}.weight"]
    assert np.array_equal(matrix.dequantise(), load_file(path)[f"bits{bits}{order}.want"])
    assert (matrix.column_order is not None) == bool(order)


@pytest.mark.parametrize("group", [32, 64])
def test_autoawq(group: int) -> None:
    name, path = f"group{group}", DATA / "awq.safetensors"
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
    }
    tensors = {
        key: tensor for key, tensor in read_safetensors(path).items() if key.startswith(f"{name}.")
    }
    matrix = method_of(config).assemble(config, tensors, "here")[f"{name}.weight"]
    assert np.array_equal(matrix.dequantise(), load_file(path)[f"{name}.want"])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_hqq(bits: int) -> None:
    """Float zeros become the values of code 0, which rounds once more."""
    name, path = f"bits{bits}", DATA / "hqq.safetensors"
    want, scales = load_file(path)[f"{name}.want"], load_file(path)[f"{name}.scale"]
    assert (
        np.abs(assembled_hqq(name).dequantise() - want).max()
        <= 1e-7 * (1 << bits) * np.abs(scales).max()
    )


def test_hqq_by_rows() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tensor axis0\.axis is 0"):
        assembled_hqq("axis0")


def assembled_hqq(name: str) -> StoredTensor:
    config = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"axis": 1}}}
    tensors = {
        key: tensor
        for key, tensor in read_safetensors(DATA / "hqq.safetensors").items()
        if key.startswith(f"{name}.")
    }
    found = method_of(config).assemble(config, tensors, "here")
    assert found.keys() <= {f"{name}.weight", f"{name}.want"}
    return found[f"{name}.weight"]
