"""Weights made by compressed-tensors: dequantised as by the library, and computed as by
transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers import LlamaForCausalLM

from headrace.checkpoint.load import open_checkpoint
from tests.folders import TOKENS, assembled, backends, logits_of, tiny_llama, write_folder

INT = {"type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"int{bits}": ("pack-quantized", INT | {"num_bits": bits}) for bits in range(2, 9)},
    **{
        f"int{bits}-points": ("pack-quantized", INT | {"num_bits": bits, "symmetric": False})
        for bits in range(2, 9)
    },
    "int4-channel": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "channel", "group_size": None},
    ),
    "int8-channel": (
        "int-quantized",
        INT | {"num_bits": 8, "strategy": "channel", "group_size": None},
    ),
    "int8-group": ("int-quantized", INT | {"num_bits": 8}),
    "int8-group-points": ("int-quantized", INT | {"num_bits": 8, "symmetric": False}),
    "int8-tensor": (
        "naive-quantized",
        INT | {"num_bits": 8, "strategy": "tensor", "group_size": None},
    ),
    "float8-tensor": ("float-quantized", FLOAT | {"strategy": "tensor"}),
    "float8-channel": ("float-quantized", FLOAT),
    "float8-group": ("naive-quantized", FLOAT | {"strategy": "group", "group_size": 32}),
    "float8-block": ("float-quantized", FLOAT | {"strategy": "block", "block_structure": [64, 32]}),
    "mxfp8": (
        "mxfp8-quantized",
        FLOAT | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        FLOAT | {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        FLOAT
        | {
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    ),
}


def config_of(kind: str, args: QuantizationArgs) -> dict[str, Any]:
    weights = json.loads(args.model_dump_json())
    groups = {
        "group_0": {
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
        }
    }
    fields = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return fields | {"format": kind, "config_groups": groups}


def compressed(
    kind: str, args: QuantizationArgs, weight: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The library's values of a weight, with scales by the maxima of groups, and the
    tensors of a file.
    """
    (rows, cols), strategy = weight.shape, args.strategy
    high, wide = {
        "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
        "channel": (1, cols),
        "tensor": (rows, cols),
        "block": args.block_structure,
    }[strategy]
    padded = torch.nn.functional.pad(weight, (0, -cols % wide, 0, -rows % high))
    largest = padded.reshape(-(-rows // high), high, -(-cols // wide), wide).abs().amax(dim=(1, 3))
    scale = largest / (
        2 ** (args.num_bits - 1) if args.type == "int" else 6.0 if args.num_bits == 4 else 448.0
    )
    state = {"weight": weight, "weight_scale": scale.reshape(1) if strategy == "tensor" else scale}
    if kind.startswith("mx"):
        state["weight_scale"] = torch.exp2(torch.ceil(torch.log2(scale)))
    if strategy == "tensor_group":
        state["weight_global_scale"] = 448 / scale.max().reshape(1)
        state["weight_scale"] = (
            (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        )
    if not args.symmetric:
        top = 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-(top // 2), top // 2, scale.shape).to(
            torch.int8
        )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(kind)
    tensors = compressor.compress(state, scheme)
    return compressor.decompress(tensors, scheme)["weight"].float(), tensors


@pytest.mark.parametrize("name", KINDS)
def test_compressed_tensors_weights(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    kind, fields = KINDS[name]
    args = QuantizationArgs(**fields)
    want, tensors = compressed(kind, args, torch.randn(72, 128))
    found = assembled(
        tmp_path,
        config_of(kind, args),
        {f"x.{part}": tensor.contiguous() for part, tensor in tensors.items()},
    )
    assert found.keys() == {"x.weight"}
    near = (
        2**-7 if name == "nvfp4" else 0
    )  # of these alone the library computes the values in bfloat16
    np.testing.assert_allclose(found["x.weight"].dequantise(), want.numpy(), rtol=near, atol=0)


@pytest.mark.parametrize(
    "name", ["int4", "int4-channel", "int8", "float8-tensor", "float8-channel", "float8-block"]
)
def test_compressed_tensors_folders(name: str, tmp_path: Path) -> None:
    """transformers computes the same; with compressed-tensors 0.20 it loads no packed
    zero points.
    """
    kind, fields = KINDS[name]
    args = QuantizationArgs(**fields)

    def stored(
        weight_name: str, weight: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values, tensors = compressed(kind, args, weight)
        return values, {
            weight_name.removesuffix("weight") + part: tensor.contiguous()
            for part, tensor in tensors.items()
        }

    write_folder(tmp_path, tiny_llama(64, 160), config_of(kind, args), stored)
    with torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        want = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].numpy()
    truth, executable = backends(open_checkpoint(tmp_path), "")
    exact, got = logits_of(truth, [TOKENS]), logits_of(executable, [TOKENS])
    assert np.linalg.norm(exact - want) < 1e-4 * np.linalg.norm(want)
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)
