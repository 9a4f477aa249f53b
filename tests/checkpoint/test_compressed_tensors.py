"""W8A8 folders as llm-compressor writes them: made here from tiny random models, read back, computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import _native
from headrace.backend import cpu, forward, reference
from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.config import KvConfig
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import trace_model
from tests.backend.batches import Sequence, batch_of

ARGS = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None, "actorder": None}
WEIGHTS: dict[str, Any] = ARGS | {"strategy": "channel", "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
ACTIVATIONS: dict[str, Any] = ARGS | {"strategy": "token", "dynamic": True, "observer": "memoryless", "observer_kwargs": {}}
GROUP: dict[str, Any] = {"weights": WEIGHTS, "input_activations": ACTIVATIONS, "output_activations": None, "targets": ["Linear"]}
W8A8: dict[str, Any] = {
    "config_groups": {"group_0": GROUP},
    "format": "int-quantized",
    "global_compression_ratio": 1.3,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
TOKENS = 45


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 and scales [rows, 1] in bfloat16; code -128 occurs."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127.5).to(torch.bfloat16)
    return (weight / scale.float()).round().clamp(-128, 127).to(torch.int8), scale


def write(folder: Path, model: LlamaForCausalLM, config: dict[str, Any] = W8A8) -> None:
    """The folder of a model whose linear layers, but not its head, are quantised; the model gets the weights that these stand for."""
    state = {}
    for name, value in model.state_dict().items():
        if value.ndim == 2 and "proj" in name:
            codes, scale = quantise(value)
            value.copy_(codes.float() * scale.float())
            state |= {name: codes, f"{name}_scale": scale}
        else:
            state[name] = value
    model.config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": config, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(state, folder / "model.safetensors")


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits_of(executable: reference.ReferenceExecutable | cpu.CpuExecutable, chunks: list[int]) -> NDArray[np.float32]:
    """Of a prompt computed in chunks of these sizes, [tokens, vocab]."""
    sequence, tokens, found = Sequence([1, 3, 0], 32), (np.arange(TOKENS) * 37 % 96).tolist(), []
    for rows in chunks:
        batch = batch_of([sequence], [tokens[sequence.computed : sequence.computed + rows]], [([], [])], False)
        found.append(forward(executable, batch).logits.copy())
        sequence.computed += rows
    return np.concatenate(found)


def backends(checkpoint: Checkpoint, isa: str, threads: int = 2) -> tuple[reference.ReferenceExecutable, cpu.CpuExecutable]:
    program, kv = trace_model(checkpoint.spec, checkpoint.tensors), KvConfig((4,), 32, "f32")
    tensors = checkpoint.tensors
    return reference.compile(program, tensors, kv, 1), cpu.CpuExecutable(program, tensors, kv, threads, isa)


def test_the_reference_computes_what_transformers_does(tmp_path: Path, model: LlamaForCausalLM) -> None:
    write(tmp_path, model)
    checkpoint = open_checkpoint(tmp_path)
    with torch.no_grad():
        want = model(torch.arange(TOKENS)[None] * 37 % 96).logits[0].numpy()
    formats = {name.rpartition(".")[2]: tensor.format.name for name, tensor in checkpoint.tensors.items()}
    assert {formats[part] for part in ("q", "k", "v", "o", "gate", "up", "down")} == {"I8_ROW"}
    assert {formats[part] for part in ("embed", "head", "norm", "q_bias")} == {"F32"}
    got = logits_of(backends(checkpoint, "")[0], [TOKENS])
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kept_in_float", [[], ["o_proj"], ["down_proj", "k_proj"], ["up_proj"]])
def test_cpu_is_near_the_reference_and_one_with_itself(isa: str, kept_in_float: list[str], tmp_path: Path, model: LlamaForCausalLM) -> None:
    """With all layers int8, and with some of the first left out: their inputs are packed in both ways, or not at all."""
    write(tmp_path, model)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    for name in [name for name in state if "layers.0" in name and any(f"{part}.weight" in name for part in kept_in_float)]:
        state[name] = model.state_dict()[name] if name in model.state_dict() else state[name]
        state.pop(f"{name}_scale", None)
    save_file({name: value for name, value in state.items() if not name.endswith("_scale") or name.removesuffix("_scale") in state}, path)
    truth, executable = backends(open_checkpoint(tmp_path), isa)
    want, got = logits_of(truth, [TOKENS]), logits_of(executable, [TOKENS])
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)
    assert np.array_equal(got, logits_of(executable, [17, 1, 1, TOKENS - 19]))
    _, alone = backends(open_checkpoint(tmp_path), isa, threads=1)
    assert np.array_equal(got, logits_of(alone, [TOKENS]))


def test_a_matrix_that_a_sum_cannot_hold_is_named(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 2, "intermediate_size": (1 << 17) + 1, "num_hidden_layers": 1, "num_attention_heads": 1}
    write(tmp_path, LlamaForCausalLM(LlamaConfig(**sizes)))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.down.*131,072 columns"):
        backends(open_checkpoint(tmp_path), "")


class TestConfigs:
    def config(self, folder: Path, change: dict[str, Any]) -> None:
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        values = sizes | {"model_type": "llama", "quantization_config": W8A8 | change}
        (folder / "config.json").write_text(json.dumps(values))
        open_folder(folder)

    @pytest.mark.parametrize(
        "change",
        [
            {},
            {"config_groups": {"group_0": GROUP | {"input_activations": None}}},
            {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}},
            {"config_groups": {"a": GROUP, "b": GROUP | {"targets": ["re:.*q_proj"], "format": "int-quantized"}}, "ignore": []},
        ],
    )
    def test_read(self, tmp_path: Path, change: dict[str, Any]) -> None:
        self.config(tmp_path, change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"quant_method": "vptq"}, "quant_method = vptq"),
            ({"format": "pack-quantized"}, "format = pack-quantized"),
            ({"format": None}, "format = None"),
            ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
            ({"transform_config": {"config_groups": {}}}, "transform_config"),
            ({"config_groups": {}}, "config_groups"),
            ({"config_groups": [GROUP]}, "config_groups"),
            ({"config_groups": {"a": None}}, "config_groups"),
            ({"config_groups": {"a": GROUP, "b": GROUP | {"weights": None}}}, r"b\.weights = None"),
            ({"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"num_bits": 4}}}}, r"a\.weights\.num_bits = 4"),
            ({"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"type": "float"}}}}, r"a\.weights\.type = float"),
            ({"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"strategy": "tensor"}}}}, r"a\.weights\.strategy = tensor"),
            ({"config_groups": {"a": GROUP | {"weights": WEIGHTS | {"symmetric": False}}}}, r"a\.weights\.symmetric = False"),
            ({"config_groups": {"a": GROUP | {"input_activations": ACTIVATIONS | {"dynamic": False}}}}, "dynamic = False"),
            ({"config_groups": {"a": GROUP | {"input_activations": ACTIVATIONS | {"symmetric": False}}}}, "symmetric = False"),
            ({"config_groups": {"a": GROUP | {"output_activations": ACTIVATIONS}}}, "output_activations"),
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
            (None, r"q_proj\.weight is int8, and .*weight_scale is not there"),
            (torch.ones(64, 1, dtype=torch.int8), "not there as numbers"),
            (torch.ones(1), r"shapes \[64, 64\] and \[1\]"),
            (torch.ones(64, 2), r"shapes \[64, 64\] and \[64, 2\]"),
            (torch.full((64, 1), float("inf")), "not finite"),
            (torch.full((64, 1), float("nan")), "not finite"),
        ],
    )
    def test_scales(self, tmp_path: Path, model: LlamaForCausalLM, scale: torch.Tensor | None, message: str) -> None:
        write(tmp_path, model)
        state = load_file(tmp_path / "model.safetensors")
        state.pop(f"{self.NAME}_scale")
        save_file(state | ({} if scale is None else {f"{self.NAME}_scale": scale}), tmp_path / "model.safetensors")
        with pytest.raises(FormatError, match=message):
            open_checkpoint(tmp_path)

    def test_zero_points_have_no_place(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        write(tmp_path, model)
        state = load_file(tmp_path / "model.safetensors")
        points = torch.zeros(64, 1, dtype=torch.int8)
        save_file(state | {self.NAME.replace("weight", "weight_zero_point"): points}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match="weight_zero_point is int8 and no weight"):
            open_checkpoint(tmp_path)
