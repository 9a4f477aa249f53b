"""W8A8 folders in llm-compressor's format, made of tiny random models, read and computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import _native
from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import open_checkpoint
from headrace.errors import FormatError, UnsupportedModelError
from tests.folders import TOKENS, backends, logits_of, tiny_llama, write_folder

ARGS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
}
WEIGHTS: dict[str, Any] = ARGS | {
    "strategy": "channel",
    "dynamic": False,
    "observer": "minmax",
    "observer_kwargs": {},
}
ACTIVATIONS: dict[str, Any] = ARGS | {
    "strategy": "token",
    "dynamic": True,
    "observer": "memoryless",
    "observer_kwargs": {},
}
GROUP: dict[str, Any] = {
    "weights": WEIGHTS,
    "input_activations": ACTIVATIONS,
    "output_activations": None,
    "targets": ["Linear"],
}
W8A8: dict[str, Any] = {
    "config_groups": {"group_0": GROUP},
    "format": "int-quantized",
    "global_compression_ratio": 1.3,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def of_blocks(structure: list[int]) -> dict[str, Any]:
    return GROUP | {
        "weights": WEIGHTS | {"type": "float", "strategy": "block", "block_structure": structure},
        "input_activations": None,
    }


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 and scales [rows, 1] in bfloat16; code -128 occurs."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127.5).to(torch.bfloat16)
    return (weight / scale.float()).round().clamp(-128, 127).to(torch.int8), scale


def write(folder: Path, model: LlamaForCausalLM, config: dict[str, Any] = W8A8) -> None:
    """Write a folder whose linear layers, except the head, are quantised; the model
    gets the dequantised weights.
    """

    def stored(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        codes, scale = quantise(weight)
        return codes.float() * scale.float(), {name: codes, f"{name}_scale": scale}

    write_folder(folder, model, config, stored)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def test_the_reference_computes_what_transformers_does(
    tmp_path: Path, model: LlamaForCausalLM
) -> None:
    write(tmp_path, model)
    checkpoint = open_checkpoint(tmp_path)
    with torch.no_grad():
        want = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].numpy()
    formats = {
        name.rpartition(".")[2]: tensor.format.name for name, tensor in checkpoint.tensors.items()
    }
    assert {formats[part] for part in ("q", "k", "v", "o", "gate", "up", "down")} == {"I8_ROW"}
    assert {formats[part] for part in ("embed", "head", "norm", "q_bias")} == {"F32"}
    got = logits_of(backends(checkpoint, "")[0], [TOKENS])
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kept_in_float", [[], ["o_proj"], ["down_proj", "k_proj"], ["up_proj"]])
def test_cpu_is_near_the_reference_and_deterministic(
    isa: str, kept_in_float: list[str], tmp_path: Path, model: LlamaForCausalLM
) -> None:
    """All layers are int8, or some of the first layer are not: inputs are packed in
    both ways, or not at all.
    """
    write(tmp_path, model)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    for name in [
        name
        for name in state
        if "layers.0" in name and any(f"{part}.weight" in name for part in kept_in_float)
    ]:
        state[name] = model.state_dict()[name] if name in model.state_dict() else state[name]
        state.pop(f"{name}_scale", None)
    save_file(
        {
            name: value
            for name, value in state.items()
            if not name.endswith("_scale") or name.removesuffix("_scale") in state
        },
        path,
    )
    truth, executable = backends(open_checkpoint(tmp_path), isa)
    want, got = logits_of(truth, [TOKENS]), logits_of(executable, [TOKENS])
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)
    assert np.array_equal(got, logits_of(executable, [17, 1, 1, TOKENS - 19]))
    _, alone = backends(open_checkpoint(tmp_path), isa, threads=1)
    assert np.array_equal(got, logits_of(alone, [TOKENS]))


def test_a_matrix_that_a_sum_cannot_hold_is_named(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 2,
        "intermediate_size": (1 << 17) + 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    write(tmp_path, LlamaForCausalLM(LlamaConfig(**sizes)))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.down.*131,072 columns"):
        backends(open_checkpoint(tmp_path), "")


class TestConfigs:
    def config(self, folder: Path, change: dict[str, Any]) -> None:
        sizes = {
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        values = sizes | {"model_type": "llama", "quantization_config": W8A8 | change}
        (folder / "config.json").write_text(json.dumps(values))
        open_folder(folder)

    @pytest.mark.parametrize(
        "change",
        [
            {},
            {"config_groups": {"group_0": GROUP | {"input_activations": None}}},
            {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}},
            {
                "config_groups": {"a": of_blocks([128, 128]), "b": of_blocks([128, 128])},
                "format": "float-quantized",
            },
            {
                "config_groups": {
                    "a": GROUP
                    | {
                        "input_activations": {
                            "type": "float",
                            "dynamic": False,
                            "strategy": "tensor",
                        }
                    }
                }
            },
            {
                "config_groups": {
                    "a": GROUP | {"weights": WEIGHTS | {"num_bits": 4, "symmetric": False}}
                },
                "format": "pack-quantized",
            },
            {
                "config_groups": {
                    "a": GROUP,
                    "b": GROUP | {"targets": ["re:.*q_proj"], "format": "int-quantized"},
                },
                "ignore": [],
            },
        ],
    )
    def test_read(self, tmp_path: Path, change: dict[str, Any]) -> None:
        self.config(tmp_path, change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "marlin-25"}, "format = marlin-25"),
            ({"sparsity_config": {"format": "sparse-bsr"}}, "sparsity_config"),
            ({"format": None}, "format = None"),
            ({"transform_config": {"config_groups": {}}}, "transform_config"),
            ({"config_groups": {}}, "config_groups"),
            ({"config_groups": [GROUP]}, "config_groups"),
            ({"config_groups": {"a": None}}, "config_groups"),
            ({"config_groups": {"a": GROUP, "b": GROUP | {"weights": None}}}, r"b\.weights = None"),
            ({"config_groups": {"a": GROUP | {"format": "dense"}}}, r"a\.format = dense"),
            (
                {"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"num_bits": 16}}}},
                r"a\.weights\.num_bits = 16",
            ),
            (
                {"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"num_bits": 8.0}}}},
                r"a\.weights\.num_bits = 8\.0",
            ),
            (
                {"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"type": "complex"}}}},
                r"a\.weights\.type = complex",
            ),
            (
                {
                    "config_groups": {
                        "a": GROUP | {"weights": WEIGHTS | {"type": "float", "num_bits": 6}}
                    }
                },
                r"a\.weights\.num_bits = 6",
            ),
            (
                {
                    "config_groups": {
                        "a": GROUP | {"weights": WEIGHTS | {"type": "float", "symmetric": False}}
                    }
                },
                "symmetric = False",
            ),
            (
                {"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"strategy": "attn_head"}}}},
                r"a\.weights\.strategy = attn_head",
            ),
            (
                {"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"strategy": "block"}}}},
                r"a\.weights\.block_structure = None",
            ),
            (
                {"config_groups": {"a": of_blocks([128, 128]), "b": of_blocks([64, 64])}},
                "block_structure",
            ),
            (
                {"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"dynamic": True}}}},
                r"a\.weights\.dynamic = True",
            ),
            (
                {
                    "config_groups": {
                        "a": GROUP | {"input_activations": ACTIVATIONS | {"dynamic": False}}
                    }
                },
                "dynamic = False",
            ),
            (
                {"config_groups": {"a": GROUP | {"input_activations": "int8"}}},
                r"a\.input_activations = int8",
            ),
            (
                {
                    "config_groups": {
                        "a": GROUP | {"input_activations": ACTIVATIONS | {"symmetric": False}}
                    }
                },
                "symmetric = False",
            ),
            (
                {"config_groups": {"a": GROUP | {"output_activations": ACTIVATIONS}}},
                "output_activations",
            ),
        ],
    )
    def test_refused(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        with pytest.raises(UnsupportedModelError, match=rf"quantization_config: .*{message}.*W8A8"):
            self.config(tmp_path, change)


class TestMalformed:
    NAME = "model.layers.1.self_attn.q_proj.weight"

    @pytest.mark.parametrize(
        ("scale", "message"),
        [
            (None, r"q_proj\.weight is int8, but .*weight_scale is missing"),
            (torch.ones(64, 1, dtype=torch.int8), "is missing or not floats"),
            (
                torch.ones(3),
                r"q_proj\.weight_scale has shape \[3\]; the scales of a matrix \[64, 64\] are",
            ),
            (torch.ones(64, 5), r"shape \[64, 5\]"),
            (torch.ones(63, 2), r"shape \[63, 2\]"),
            (torch.full((64, 1), float("inf")), "not finite"),
            (torch.full((64, 1), float("nan")), "not finite"),
        ],
    )
    def test_scales(
        self, tmp_path: Path, model: LlamaForCausalLM, scale: torch.Tensor | None, message: str
    ) -> None:
        write(tmp_path, model)
        state = load_file(tmp_path / "model.safetensors")
        state.pop(f"{self.NAME}_scale")
        save_file(
            state | ({} if scale is None else {f"{self.NAME}_scale": scale}),
            tmp_path / "model.safetensors",
        )
        with pytest.raises(FormatError, match=message):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("points", "error", "message"),
        [
            (
                ("q_proj.weight_zero_point", torch.ones(63, 1, dtype=torch.int8)),
                FormatError,
                r"zero_point is I8 \[63, 1\]",
            ),
            (
                ("q_proj.weight_zero_point", torch.ones(64, 1)),
                FormatError,
                r"zero_point is F32 \[64, 1\]",
            ),
            (
                ("other", torch.ones(64, 1, dtype=torch.int8)),
                UnsupportedModelError,
                "other is int8 but not a weight",
            ),
        ],
    )
    def test_zero_points(
        self,
        tmp_path: Path,
        model: LlamaForCausalLM,
        points: tuple[str, torch.Tensor],
        error: type[Exception],
        message: str,
    ) -> None:
        write(tmp_path, model)
        state = load_file(tmp_path / "model.safetensors")
        save_file(
            state | {self.NAME.replace("q_proj.weight", points[0]): points[1]},
            tmp_path / "model.safetensors",
        )
        with pytest.raises(error, match=message):
            open_checkpoint(tmp_path)
