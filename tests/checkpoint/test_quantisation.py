"""A quantisation method is found by its configuration, checks it, and joins tensors."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.checkpoint import quantisation
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.quantisation.method import Config, Tensors, refusal
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.formats import FORMATS, RAW_FORMATS, StoredTensor

NAME = "model.layers.0.mlp.up_proj"


class Halves:
    """A made-up method: a weight is the sum of two stored matrices, perhaps with
    another sign.
    """

    supported = "halves with any sign"

    def check(self, config: Config) -> None:
        if config.get("sign") not in (1, -1):
            raise refusal("sign", config.get("sign"), self.supported)

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        result = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.endswith((".left", ".right"))
        }
        for name in (name.removesuffix(".left") for name in tensors if name.endswith(".left")):
            values = config["sign"] * (
                tensors[f"{name}.left"].dequantise() + tensors[f"{name}.right"].dequantise()
            )
            result[f"{name}.weight"] = StoredTensor.from_floats(f"{name}.weight", values)
        return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    return tmp_path


def configure(folder: Path, config: Any) -> None:
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))


def test_a_method_is_one_table_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantisation.METHODS, "halves", (__name__, "Halves"))
    path = folder / "model.safetensors"
    state = load_file(path)
    weight = state.pop(f"{NAME}.weight")
    save_file(state | {f"{NAME}.left": weight / 4, f"{NAME}.right": weight * 3 / 4}, path)
    configure(folder, {"quant_method": "halves", "sign": -1})
    np.testing.assert_allclose(
        open_checkpoint(folder).tensors["layers.0.up"].dequantise(), -weight, rtol=1e-6
    )
    configure(folder, {"quant_method": "halves", "sign": 0})
    with pytest.raises(
        UnsupportedModelError,
        match="quantization_config: sign = 0 is not supported; supported: halves",
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("config", [{"quant_method": "vptq"}, {}, [], "int8", 3])
def test_an_unknown_method_is_refused_with_the_known_ones(folder: Path, config: Any) -> None:
    configure(folder, config)
    with pytest.raises(
        UnsupportedModelError,
        match=r"quantization_config: .* is not supported; supported: awq, bitsandbytes, "
        r"compressed-tensors",
    ):
        open_checkpoint(folder)


def test_int8_without_a_configuration_is_refused(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    codes = np.ones((12, 8), np.int8)
    save_file(state | {f"{NAME}.weight": codes}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has type I8"):
        open_checkpoint(folder)
    assert "I8" not in FORMATS


def raw(shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor.from_bytes(
        "x", RAW_FORMATS["U8"], shape, np.zeros(math.prod(shape), np.uint8)
    )


def test_mxfp4() -> None:
    method = quantisation.method_of(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    other = StoredTensor.from_floats("y", np.zeros((2, 3), np.float32))
    found = method.assemble(
        {}, {"x_blocks": raw((2, 6, 3, 16)), "x_scales": raw((2, 6, 3)), "y": other}, "a"
    )
    assert found.keys() == {"x_blocks", "y"} and found["y"] is other
    assert (found["x_blocks"].format.name, found["x_blocks"].shape, found["x_blocks"].rows) == (
        "MXFP4_PAIRS",
        (2, 6, 96),
        12,
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x_blocks": raw((2, 3, 16))}, "are missing or not bytes"),
        (
            {
                "x_blocks": raw((2, 3, 16)),
                "x_scales": StoredTensor.from_floats("s", np.zeros((2, 3), np.float32)),
            },
            "are missing or not bytes",
        ),
        (
            {"x_blocks": raw((2, 3, 15)), "x_scales": raw((2, 3))},
            r"shapes \[2, 3, 15\] and \[2, 3\]",
        ),
        ({"x_blocks": raw((2, 3, 16)), "x_scales": raw((3, 2))}, "shapes"),
        ({"x_blocks": raw((3, 16)), "x_scales": raw((3,))}, "shapes"),
    ],
)
def test_malformed_mxfp4(tensors: dict[str, StoredTensor], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        quantisation.method_of({"quant_method": "mxfp4"}).assemble({}, tensors, "a")
    with pytest.raises(UnsupportedModelError, match="dequantize"):
        quantisation.method_of({"quant_method": "mxfp4", "dequantize": True})
