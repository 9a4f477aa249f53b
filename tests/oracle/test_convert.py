"""Folders that we write give the same weights and logits in the libraries of their
formats.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Qwen2MoeForCausalLM

from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import open_checkpoint
from tests.convert.test_folder import written
from tests.convert.test_moefy import dense_model, moefied, to_folder
from tests.folders import TOKENS, backends, check_engine, logits_of, tiny_llama

FORMATS = [
    "int2-g32",
    "int3-g32",
    "int4-g32",
    "int8-g32",
    "int4-row",
    "int8-row",
    "e4m3-row",
    "nf4-g32",
    "fp4-g64",
]
ASYMMETRIC = ["int2-g32-asym", "int3-g32-asym", "int4-row-asym", "int8-g64-asym"]
"""Formats that transformers 5.23 cannot load: it expects unpacked zero points. The
compressor itself checks them.
"""


@pytest.mark.usefixtures("without_avx512bf16")
@pytest.mark.parametrize("name", FORMATS)
def test_transformers_computes_written_folders(name: str, tmp_path: Path) -> None:
    tiny_llama(64, 128).save_pretrained(tmp_path / "model")
    written(tmp_path / "model", name, tmp_path / "out")
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, device_map="cpu"
    ).eval()
    for parameter in model.parameters():
        if (
            parameter.dtype == torch.bfloat16
        ):  # as a model of bitsandbytes has all that is not quantised
            parameter.data = parameter.data.float()
    check_engine(tmp_path / "out", model, near=0.05)


@pytest.mark.parametrize("variant", ["smollm2", "qwen2"])
def test_transformers_computes_moefied_folders(variant: str, tmp_path: Path) -> None:
    source = dense_model(variant, tmp_path / "model")
    made = open_checkpoint(to_folder(moefied(source, 6, 4, layers=(0, 2)), tmp_path / "out"))
    model = Qwen2MoeForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    truth, ours = (logits_of(each, [TOKENS]) for each in backends(made, ""))
    with torch.no_grad():
        theirs = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].numpy()
    assert np.linalg.norm(truth - theirs) < 1e-4 * np.linalg.norm(theirs)
    assert np.linalg.norm(ours - theirs) < 0.02 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    ("is_tied", "types"),
    [
        (True, {"embed": "int4-g32"}),
        (False, {"embed": "int4-g32", "head": "int4-g32"}),
        (False, {"head": "int8-row"}),
    ],
)
def test_transformers_computes_quantised_embeddings_and_heads(
    is_tied: bool, types: dict[str, str], tmp_path: Path
) -> None:
    """It reads embeddings in the format of the other matrices, and heads in any format."""
    model = tiny_llama(64, 128, is_tied=is_tied)
    model.save_pretrained(tmp_path / "model")
    written(tmp_path / "model", "int4-g32", tmp_path / "out", types)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    checkpoint = open_checkpoint(tmp_path / "out")
    truth, ours = (logits_of(each, [TOKENS]) for each in backends(checkpoint, ""))
    with torch.no_grad():
        theirs = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].numpy()
    # Some weights are multiplied in float16 there, the type of the scales.
    assert np.linalg.norm(truth - theirs) < 1e-3 * np.linalg.norm(theirs)
    assert np.linalg.norm(ours - truth) < 0.05 * np.linalg.norm(truth)
    assert all(checkpoint.tensors[name].format.quantised for name in types)


def test_bitsandbytes_multiplies_written_int8(tmp_path: Path) -> None:
    """Both round activations, so both are near to the weights' exact result."""
    tiny_llama(64, 128).save_pretrained(tmp_path / "model")
    written(tmp_path / "model", "llm-int8", tmp_path / "out")
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, device_map="cpu"
    ).eval()
    truth, ours = (
        logits_of(each, [TOKENS]) for each in backends(open_checkpoint(tmp_path / "out"), "")
    )
    with torch.no_grad():
        theirs = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].float().numpy()
    for logits in (ours, theirs):
        assert np.linalg.norm(logits - truth) < 0.03 * np.linalg.norm(truth)


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_the_compressor_reads_zero_points(name: str, tmp_path: Path) -> None:
    tiny_llama(64, 128).save_pretrained(tmp_path / "model")
    written(tmp_path / "model", name, tmp_path / "out")
    config = QuantizationConfig.model_validate(
        json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    )
    compressor = BaseCompressor.get_value_from_registry(config.format)
    stored, ours = (
        load_file(tmp_path / "out/model.safetensors"),
        open_folder(tmp_path / "out").read().tensors,
    )
    layers = [
        key.removesuffix(".weight_zero_point")
        for key in stored
        if key.endswith(".weight_zero_point")
    ]
    assert len(layers) == 7 * 3
    for layer in layers:
        parts = {
            key.removeprefix(f"{layer}."): part
            for key, part in stored.items()
            if key.startswith(f"{layer}.weight_")
        }
        values = compressor.decompress(parts, config.config_groups["group_0"])["weight"]
        # They are multiplied in float16 there, the type of the scales.
        np.testing.assert_allclose(
            ours[f"{layer}.weight"].dequantise(), values.float().numpy(), rtol=1e-3, atol=1e-6
        )
