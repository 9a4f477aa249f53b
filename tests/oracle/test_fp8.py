"""fp8 folders, dequantised as by transformers, which quantises on GPUs only; the
tensors are made here.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import FineGrainedFP8Config, LlamaForCausalLM

from headrace.checkpoint.load import open_checkpoint
from tests.folders import TOKENS, backends, logits_of, tiny_llama, write_folder


@pytest.mark.parametrize("block", [(32, 32), (64, 32)])
def test_fp8_folders(block: tuple[int, int], tmp_path: Path) -> None:
    high, wide = block

    def stored(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows, cols = weight.shape
        scale = weight.reshape(rows // high, high, cols // wide, wide).abs().amax(dim=(1, 3)) / 448
        by_number = scale.repeat_interleave(high, dim=0).repeat_interleave(wide, dim=1)
        codes = (weight / by_number).to(torch.float8_e4m3fn)
        return codes.float() * by_number, {name: codes, f"{name}_scale_inv": scale}

    fields = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(block),
    }
    write_folder(tmp_path, tiny_llama(256, 128), fields, stored)
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=block)
    model = LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32
    )
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    with torch.no_grad():
        want = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].numpy()
    for executable, near in zip(backends(open_checkpoint(tmp_path), ""), (1e-4, 5e-3), strict=True):
        got = logits_of(executable, [TOKENS])
        assert np.linalg.norm(got - want) < near * np.linalg.norm(want)
