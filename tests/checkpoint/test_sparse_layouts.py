"""2:4 layers of compressed-tensors: files of its version 0.12.2, and refusals.

`tests/data/sparse_24.safetensors` has layers that the library compressed, and their matrices or
codes as `want.*`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.quantisation.sparse import sparse_loss
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.sparse import largest_two
from tests.folders import assembled

LAYERS = load_file(Path(__file__).parents[1] / "data/sparse_24.safetensors")
METHOD = {"quant_method": "compressed-tensors"}
MASKED = METHOD | {
    "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"},
}
ANY_MASK = METHOD | {"sparsity_config": {"format": "sparse-bitmask"}}


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"strategy": "channel"} | weights}}}


INT8 = MASKED | {"format": "int-quantized"} | group()
DECLARED = METHOD | {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}


def layer(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in LAYERS.items() if key.startswith(f"{name}.")}


@pytest.mark.parametrize(
    ("name", "config", "is_sparse"),
    [
        ("bf16", MASKED, True),
        ("f16", MASKED, False),
        ("int8", INT8, True),
        ("int8g", INT8, True),
        ("any", ANY_MASK, False),
    ],
)
def test_layers_of_the_library(
    name: str, config: dict[str, Any], is_sparse: bool, tmp_path: Path
) -> None:
    found = assembled(tmp_path, config, layer(name))
    assert found.keys() == {f"{name}.weight"}
    matrix = found[f"{name}.weight"]
    want = LAYERS[f"want.{name}"].float()
    if (scale := LAYERS.get(f"{name}.weight_scale")) is not None:
        want *= scale.float().repeat_interleave(want.shape[1] // scale.shape[1], 1)
    assert matrix.shape == tuple(want.shape)
    np.testing.assert_array_equal(matrix.dequantise(), want.numpy())
    np.testing.assert_array_equal(matrix.dequantise_rows([3, 1]), want.numpy()[[3, 1]])
    assert bool(matrix.format.spec and matrix.format.spec.is_sparse) == is_sparse


MARLIN = METHOD | {"format": "marlin-24"}


@pytest.mark.parametrize("name", ["marlin4", "marlin4g", "marlin8", "marlin8g"])
def test_layers_for_a_gpu_kernel(name: str, tmp_path: Path) -> None:
    config = MARLIN | group(num_bits=int(name[6]))
    matrix = assembled(tmp_path, config, layer(name))[f"{name}.weight"]
    scale = LAYERS[f"want_scale.{name}"].float()
    want = LAYERS[f"want.{name}"].float()
    want *= scale.repeat_interleave(want.shape[1] // scale.shape[1], 1)
    np.testing.assert_array_equal(matrix.dequantise(), want.numpy())
    assert matrix.format.spec and matrix.format.spec.is_sparse


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"meta": None}, r"tensor marlin4\.weight_shape is missing"),
        ({"scale_packed": None}, r"tensor marlin4\.scale_packed is missing"),
        ({"scale_packed": torch.ones(3, 64).half()}, "do not belong to one matrix"),
        ({"scale_packed": torch.full((1, 64), torch.inf).half()}, "a number that is not finite"),
        ({"weight_packed": torch.ones(2, 64, dtype=torch.int32)}, "do not belong to one matrix"),
        ({"weight_packed": torch.ones(2, 128)}, "are not int32, float16 and int16 matrices"),
        ({"meta": torch.zeros(2, 128, dtype=torch.int16)}, "indices that do not rise"),
    ],
)
def test_layers_for_a_gpu_kernel_that_do_not_fit(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    parts = layer("marlin4") | {f"marlin4.{part}": value for part, value in change.items()}
    parts = {key: part for key, part in parts.items() if part is not None}
    with pytest.raises(FormatError, match=message):
        assembled(tmp_path, MARLIN | group(num_bits=4), parts)


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("is_24", [True, False])
def test_dense_weights_that_are_declared(kind: str, is_24: bool, tmp_path: Path) -> None:
    """A matrix that is not 2:4 stays dense."""
    torch.manual_seed(2)
    codes = torch.randint(1, 8, (40, 64)) * (1 - 2 * torch.randint(0, 2, (40, 64)))
    if is_24:
        codes *= torch.from_numpy(largest_two(torch.rand(40, 64).numpy()))
    tensors, config = {"x.weight": codes.bfloat16()}, DECLARED
    if kind == "int8":
        tensors = {"x.weight": codes.to(torch.int8), "x.weight_scale": torch.ones(40, 1)}
        config |= {"format": "int-quantized"} | group()
    elif kind == "int4":
        nibbles = (codes + 8).reshape(40, 8, 8) << torch.arange(0, 32, 4)
        tensors = {
            "x.weight_packed": nibbles.sum(-1).to(torch.int32),
            "x.weight_scale": torch.ones(40, 2).half(),
            "x.weight_shape": torch.tensor([40, 64]),
        }
        config |= {"format": "pack-quantized"} | group(num_bits=4, strategy="group", group_size=32)
    matrix = assembled(tmp_path, config, tensors)["x.weight"]
    np.testing.assert_array_equal(matrix.dequantise(), codes.float().numpy())
    assert bool(matrix.format.spec and matrix.format.spec.is_sparse) == is_24


def test_a_row_that_is_not_as_declared(tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 0, 0, 2]).repeat(64, 8).bfloat16()
    weight[33, 1] = 3
    matrix = assembled(tmp_path, DECLARED, {"x.weight": weight})["x.weight"]
    with pytest.raises(ValueError, match="says 2:4, but more than 2 of 4"):
        matrix.dequantise()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bitmask": torch.full((6, 3), 0x37, dtype=torch.uint8)}, "four columns have other than"),
        ({"bitmask": torch.full((6, 4), 0x33, dtype=torch.uint8)}, "is not a bit for each column"),
        ({"bitmask": torch.full((6, 3), 3, dtype=torch.int32)}, "is not a bit for each column"),
        ({"compressed": torch.ones(6, 11).bfloat16()}, "half as many kept values"),
        ({"compressed": None}, r"tensor bf16\.compressed is missing"),
        ({"shape": None}, r"tensor bf16\.shape is missing"),
        ({"shape": torch.tensor([6, 24, 1])}, "does not hold the 2 sizes"),
        ({"shape": torch.tensor([[-6], [24]])}, "is not a bit for each column"),
        ({"shape": torch.tensor([6.0, 24.0])}, "does not hold the 2 sizes"),
        ({"weight": torch.ones(6, 24).bfloat16()}, "exclude each other"),
    ],
)
def test_parts_that_do_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    parts = layer("bf16") | {f"bf16.{part}": value for part, value in change.items()}
    with pytest.raises(FormatError, match=message):
        assembled(tmp_path, MASKED, {key: part for key, part in parts.items() if part is not None})


def test_a_mask_with_other_values_than_bits(tmp_path: Path) -> None:
    parts = layer("any") | {"any.compressed": LAYERS["any.compressed"][:-1]}
    with pytest.raises(FormatError, match="has 21 values, but its mask has 22"):
        assembled(tmp_path, ANY_MASK, parts)


def test_kept_int8_values_need_scales_and_no_zero_points(tmp_path: Path) -> None:
    parts = layer("int8")
    with pytest.raises(UnsupportedModelError, match="has zero points"):
        points = {"int8.weight_zero_point": torch.ones(6, 1, dtype=torch.int8)}
        assembled(tmp_path, INT8, parts | points)
    del parts["int8.weight_scale"]
    with pytest.raises(FormatError, match="weight_scale is missing"):
        assembled(tmp_path, INT8, parts)


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        ({"format": "sparse-bsr"}, "sparsity_config = "),
        ({"sparsity_structure": "2:4"}, "sparsity_config = "),
        (["2:4"], "sparsity_config = "),
        (MASKED["sparsity_config"] | {"sparsity_structure": "8:16"}, "structure = 8:16"),
    ],
)
def test_refused_layouts(sparsity: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        method_of(INT8 | {"sparsity_config": sparsity})


@pytest.mark.parametrize(
    ("prune", "shown"), [("wanda", ", pruned by wanda"), ("\x1b[2J", ", pruned"), (7, ", pruned")]
)
def test_the_loss_of_a_sparse_model(prune: Any, shown: str) -> None:
    sparsity = MASKED["sparsity_config"] | {"prune": prune}
    assert (
        sparse_loss(MASKED | {"sparsity_config": sparsity}) == f"two of four weights are 0{shown}"
    )
    assert sparse_loss(ANY_MASK) == sparse_loss(None) == ""


def test_other_declared_structures_are_dense(tmp_path: Path) -> None:
    config = METHOD | {"sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"}}
    weight = {"x.weight": torch.zeros(4, 8).bfloat16()}
    assert assembled(tmp_path, config, weight)["x.weight"].format.name == "BF16"
