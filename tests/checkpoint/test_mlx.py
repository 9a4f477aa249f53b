"""Folders of mlx-lm: values of MLX 0.32.4, and a NumPy twin of its packing in a whole model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from headrace.checkpoint.quantisation.mlx import Mlx, mlx_config
from headrace.errors import FormatError, UnsupportedModelError
from tests.folders import assembled, check_engine, tiny_llama, write_folder

# sin(1.7 i) for i below 64 in bf16, quantised by MLX 0.32.4: the words in hexadecimal, scales,
# biases, the first 8 values, and the sum of all values.
MADE_BY_MLX: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "mlx.json").read_text()
)
FOUR = {"quant_method": "mlx", "bits": 4, "group_size": 32}


@pytest.mark.parametrize("made", MADE_BY_MLX, ids=lambda made: f"{made['mode']}-{made['bits']}")
def test_values_equal_those_of_mlx(made: dict[str, Any], tmp_path: Path) -> None:
    words = np.frombuffer(bytes.fromhex(made["words"]), np.uint32).copy()
    number = torch.float32 if made["biases"] else torch.uint8
    tensors = {
        "x.weight": torch.from_numpy(words)[None],
        "x.scales": torch.tensor([made["scales"]], dtype=number),
    }
    if made["biases"]:
        tensors["x.biases"] = torch.tensor([made["biases"]], dtype=number)
    config = FOUR | {key: made[key] for key in ("mode", "bits", "group_size")}
    (weight,) = assembled(tmp_path, config, tensors).values()
    values = weight.dequantise()
    assert weight.shape == (1, 64) and values[0, :8].tolist() == made["first"]
    assert values.sum(dtype=np.float64) == made["sum"]


def packed(
    values: NDArray[np.float32], bits: int, group: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], NDArray[np.float32]]:
    """Affine quantisation of a matrix as MLX packs it: tensors, and values."""
    rows = len(values)
    groups = values.reshape(rows, -1, group)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = torch.from_numpy((high - low) / (2**bits - 1)).to(dtype)
    biases = torch.from_numpy(low).to(dtype)
    scale, bias = (np.repeat(t.float().numpy(), group, axis=1) for t in (scales, biases))
    codes = np.clip(np.rint((values - bias) / scale), 0, 2**bits - 1).astype(np.uint8)
    in_bits = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    words = np.packbits(in_bits.reshape(rows, -1), axis=1, bitorder="little").view(np.uint32)
    tensors = {"weight": torch.from_numpy(words), "scales": scales, "biases": biases}
    return tensors, scale * codes + bias


@pytest.mark.parametrize(
    ("bits", "repeats"), [*((bits, False) for bits in (2, 3, 4, 5, 6, 8)), (4, True)]
)
def test_a_model_in_each_width(bits: int, repeats: bool, tmp_path: Path) -> None:
    """Embedding and head are quantised, one layer has another form, and one stays plain."""
    other, plain = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    form: dict[str, Any] = {"bits": bits, "group_size": 32}
    form |= {other: {"bits": 8, "group_size": 64}, plain: False}
    model = tiny_llama(64, 96)
    state = {}
    for name, value in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if value.ndim == 1 or layer == plain:
            state[name] = value
            continue
        width, group = (8, 64) if layer == other else (bits, 32)
        tensors, values = packed(value.numpy(), width, group, torch.float16)
        value.copy_(torch.from_numpy(values))
        state |= {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
    write_folder(tmp_path, model, form, lambda name, value: (value, {}))

    save_file(state, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = config["quantization_config"]
    if not repeats:
        del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = check_engine(tmp_path, model, near=0.1 if bits == 2 else 0.03)
    assert checkpoint.tensors["layers.0.q"].format.spec.group == 64
    assert checkpoint.tensors["layers.1.up"].format.name == "F32"


@pytest.mark.parametrize(
    ("prefix", "kinds"),
    [
        ("model.layers.0.mlp.switch_mlp.", {"gate_proj": "gate_proj"}),
        ("model.layers.0.block_sparse_moe.switch_mlp.", {"gate_proj": "w1", "down_proj": "w2"}),
    ],
)
def test_stacked_experts_become_matrices(
    prefix: str, kinds: dict[str, str], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    for kind, usual in kinds.items():
        values = rng.standard_normal((3 * 16, 64)).astype(np.float32)
        tensors, want = packed(values, 4, 32, torch.bfloat16)
        stacked = {
            f"{prefix}{kind}.{part}": tensor.reshape(3, 16, -1) for part, tensor in tensors.items()
        }
        found = assembled(tmp_path, FOUR, stacked)
        name = prefix.replace("switch_mlp", "experts") + "{}." + usual + ".weight"
        assert found.keys() == {name.format(expert) for expert in range(3)}
        for expert in range(3):
            rows = want[16 * expert : 16 * expert + 16]
            np.testing.assert_allclose(found[name.format(expert)].dequantise(), rows, atol=1e-6)


def test_only_folders_without_a_method_are_of_mlx() -> None:
    form = {"bits": 4, "group_size": 64}
    assert mlx_config({"quantization": form}) == {**form, "quant_method": "mlx"}
    assert mlx_config({"quantization": form, "quantization_config": form})
    other = {"quant_method": "gptq"}
    assert mlx_config({"quantization": form, "quantization_config": other}) is None
    assert mlx_config({"quantization": "4bit"}) is None and mlx_config({}) is None


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"bits": 7}, "bits 7"),
        ({"group_size": 48}, "group_size 48"),
        ({"mode": "ternary"}, "mode ternary"),
        ({"bits": None}, "bits None"),
        ({"mode": "mxfp4", "group_size": 64}, "mode mxfp4, bits 4 and group_size 64"),
        ({"lm_head": {"bits": 7}}, "quantization: lm_head has mode affine, bits 7"),
    ],
)
def test_refused_forms(field: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{message}.*convert it with headrace convert"):
        Mlx().check(FOUR | field)


def tensors_of(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors, _ = packed(np.ones((8, 64), np.float32) * np.arange(64), 4, 32, torch.float16)
    return {
        f"x.{name}": tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None
    }


MALFORMED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "no scales": (tensors_of(scales=None), {}, "tensor x.scales is missing"),
    "no biases": (tensors_of(biases=None), {}, "tensor x.biases is missing"),
    "other groups": (tensors_of(scales=torch.ones(8, 3)), {}, "do not fill"),
    "other types": (tensors_of(biases=torch.zeros(8, 2)), {}, "expected floats of one type"),
    "not finite": (
        tensors_of(scales=torch.full((8, 2), torch.inf, dtype=torch.float16)),
        {},
        "a number that is not finite",
    ),
    "floats for powers": (tensors_of(biases=None), {"mode": "mxfp4"}, "is F16, expected U8"),
    "a power that is NaN": (
        tensors_of(scales=torch.full((8, 2), 255, dtype=torch.uint8), biases=None),
        {"mode": "mxfp4"},
        "a power of two that is NaN",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_tensors(case: str, tmp_path: Path) -> None:
    tensors, field, message = MALFORMED[case]
    with pytest.raises(FormatError, match=message):
        assembled(tmp_path, FOUR | field, tensors)
