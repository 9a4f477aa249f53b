"""Weights made by bitsandbytes on a CPU: dequantised as by the library, and computed as
by transformers.
"""

from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from headrace.checkpoint.load import open_checkpoint
from tests.folders import TOKENS, assembled, backends, logits_of, tiny_llama

FOUR: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
EIGHT: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((40, 256), 64),
        ((100, 32), 64),
        ((1, 64), 64),
        ((3, 192), 256),
        ((600, 160), 4096),
        ((1, 64), 4096),
    ],
    ids=["in rows", "over two rows", "one", "over rows", "many", "one that is not full"],
)
def test_4_bits(
    kind: str, is_nested: bool, size: int, shape: tuple[int, int], tmp_path: Path
) -> None:
    """Blocks that end with a row, or within one."""
    torch.manual_seed(shape[0])
    weight = torch.randn(shape)
    codes, state = bnb.quantize_4bit(
        weight, blocksize=size, compress_statistics=is_nested, quant_type=kind
    )
    tensors = {"x.weight": codes} | {
        f"x.weight.{name}": part.contiguous() for name, part in state.as_dict(packed=True).items()
    }
    found = assembled(tmp_path, FOUR | {"bnb_4bit_quant_type": kind}, tensors)
    np.testing.assert_allclose(
        found["x.weight"].dequantise(), dequantised(codes, state), rtol=3e-7, atol=0
    )


def dequantised(codes: torch.Tensor, state: Any) -> Any:
    """The library's values on any device: its AVX-512 kernel misreads blocks that
    continue in the next row.
    """
    largest = (
        bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
        if state.nested
        else state.absmax
    )
    return _dequantize_4bit_compute(
        codes.reshape(-1), largest.float(), state.code, state.blocksize, state.shape, state.dtype
    ).numpy()


def test_8_bits(tmp_path: Path) -> None:
    weight = torch.randn(40, 96, dtype=torch.float16)
    codes, largest, _ = bnb.int8_vectorwise_quant(weight)
    found = assembled(
        tmp_path,
        EIGHT,
        {
            "x.weight": codes,
            "x.SCB": largest,
            "x.weight_format": torch.tensor(0, dtype=torch.uint8),
        },
    )
    want = bnb.int8_vectorwise_dequant(codes, largest).numpy()
    np.testing.assert_allclose(
        found["x.weight"].dequantise(), want, rtol=3e-7, atol=0
    )  # a division by 127 against a product


@pytest.mark.parametrize(
    ("options", "near"),
    [
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            1e-4,
        ),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, 1e-4),
        ({"load_in_8bit": True}, 0.05),  # it has int8 activations, and the reference has float64
    ],
)
@pytest.mark.usefixtures("without_avx512bf16")
def test_bitsandbytes_folders(options: dict[str, Any], near: float, tmp_path: Path) -> None:
    """Folders by transformers with the layers of bitsandbytes."""
    tiny_llama(64, 192).save_pretrained(tmp_path / "plain")
    config = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32)
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "quantised")
    with torch.no_grad():
        want = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].numpy()
    truth, executable = backends(open_checkpoint(tmp_path / "quantised"), "")
    exact, got = logits_of(truth, [TOKENS]), logits_of(executable, [TOKENS])
    assert np.linalg.norm(exact - want) < near * np.linalg.norm(want)
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)
