"""Folders that transformers writes with torchao give its values and logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerTensor,
)
from transformers import AutoModelForCausalLM, TorchAoConfig

from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.safetensors import read_safetensors
from tests.folders import TOKENS, backends, logits_of, tiny_llama

KINDS: dict[str, Any] = {
    "int8": Int8WeightOnlyConfig(),
    "int8-group": Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8-tensor": Int8WeightOnlyConfig(granularity=PerTensor()),
    "int8-activations": Int8DynamicActivationInt8WeightConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int3-points": IntxWeightOnlyConfig(
        weight_dtype=torch.int3, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
    ),
    "int6-row": IntxWeightOnlyConfig(weight_dtype=torch.int6, granularity=PerAxis(0)),
    "int4-activations": Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_torchao_folders(tmp_path: Path, kind: str) -> None:
    """Logits within 1e-4 of the library's in float32, without rounded activations."""
    tiny_llama(64, 96).save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(KINDS[kind], include_input_output_embeddings=kind == "int8-group")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path / "quantised")
    tensors = open_folder(tmp_path / "quantised").read().tensors
    quantised = [
        (name, value)
        for name, value in model.state_dict().items()
        if type(value) is not torch.Tensor
    ]
    assert len(quantised) >= 14
    for name, value in quantised:
        assert np.array_equal(tensors[name].dequantise(), value.dequantize().numpy())
    if "activations" not in kind:
        with torch.no_grad():
            want = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].numpy()
        got = logits_of(backends(open_checkpoint(tmp_path / "quantised"), "")[0], [TOKENS])
        assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


def test_pairs_of_int4(tmp_path: Path) -> None:
    """The library quantises and dequantises them on accelerators only; their names are
    compared.
    """
    codes = torch.randint(-128, 128, (24, 32), dtype=torch.int8)
    scale, middle = torch.rand(2, 24).bfloat16(), torch.randn(2, 24).bfloat16()
    tensors, metadata = flatten_tensor_state_dict(
        {"x.weight": Int4Tensor(codes, scale, middle, [1, 32], torch.Size([24, 64]))}
    )
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    config = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {}}},
    }
    matrix = method_of(config).assemble(
        config, read_safetensors(tmp_path / "model.safetensors"), "here"
    )["x.weight"]
    low, high = (codes << 4) >> 4, codes >> 4
    values = torch.stack([low, high], dim=2).reshape(24, 64).double()
    want = (
        values * scale.T.repeat_interleave(32, 1).double()
        + middle.T.repeat_interleave(32, 1).double()
    )
    np.testing.assert_allclose(matrix.dequantise(), want.numpy(), rtol=1e-6, atol=1e-6)
