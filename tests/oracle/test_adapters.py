"""LoRA adapters against PEFT, which trains, saves and merges them; and refused folders."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from headrace.backend import compile_program
from headrace.batch import ints
from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.cli.main import main
from headrace.config import KvConfig
from headrace.convert.merge_adapter import merged
from headrace.convert.source_model import open_source_model
from headrace.errors import FormatError, ModelError, ModelNotFoundError, UnsupportedModelError
from headrace.model import trace_model
from headrace.quant.encode import encode
from headrace.quant.formats import FORMATS, StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.families import VARIANTS, VOCAB, logits_of, save_model

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
QKV, ALL = ["q_proj", "v_proj"], "all-linear"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "queries and values": ("llama3-gqa", {"target_modules": QKV, "r": 8, "lora_alpha": 16}),
    "all, rank stabilised": (
        "llama3-gqa",
        {"target_modules": ALL, "r": 5, "lora_alpha": 7, "use_rslora": True},
    ),
    "ranks and alphas of their own": (
        "llama2-mha",
        {
            "target_modules": ALL,
            "r": 4,
            "rank_pattern": {"q_proj": 32, "1.mlp.up_proj": 2},
            "alpha_pattern": {"v_proj": 9, "2.mlp.up_proj": 1},
        },
    ),
    "some layers": ("llama2-mha", {"target_modules": QKV, "layers_to_transform": [0, 2]}),
    "a tied head": ("smollm2", {"target_modules": ["lm_head", "down_proj"]}),
    "norms of heads": ("qwen3", {"target_modules": ALL}),
    "biases": ("qwen2", {"target_modules": ALL}),
    "fused matrices": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "columns first": (
        "gpt2",
        {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
    ),
    "fused by groups": ("falcon-40b", {"target_modules": ["query_key_value", "dense"]}),
    "norms on both sides": ("gemma2", {"target_modules": ALL}),
    "attention beside experts": ("mixtral", {"target_modules": QKV}),
    "latent attention": (
        "deepseek-v3",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
}
LORA = {"target_modules": QKV, "r": 4}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("llama3-gqa", {"target_modules": ALL, "r": 4, "use_dora": True, "use_rslora": True}),
    "DoRA of fused matrices": (
        "phi3",
        {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 4, "use_dora": True},
    ),
    "DoRA, columns first": (
        "gpt2",
        {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "DoRA with biases": ("qwen2", {"target_modules": ALL, "r": 4, "use_dora": True}),
    "a head and an embedding": (
        "llama3-gqa",
        LORA | {"modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "norms": ("gemma2", LORA | {"modules_to_save": ["norm", "input_layernorm"]}),
    "a whole fused matrix": (
        "phi3",
        {"target_modules": ["o_proj"], "modules_to_save": ["qkv_proj"]},
    ),
    "an embedding apart from a tied head": (
        "smollm2",
        LORA | {"modules_to_save": ["embed_tokens"]},
    ),
    "a head apart from a tied embedding": ("smollm2", LORA | {"modules_to_save": ["lm_head"]}),
    "both of a tie": (
        "smollm2",
        LORA | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "embedding matrices": ("llama3-gqa", {"target_modules": ["embed_tokens", "q_proj"], "r": 4}),
    "embedding matrices and a tied head": (
        "smollm2",
        {"target_modules": ["embed_tokens", "q_proj"], "r": 4},
    ),
    "embedding matrices of both of a tie": (
        "smollm2",
        {"target_modules": ["embed_tokens"], "r": 4, "ensure_weight_tying": True},
    ),
    "embedding and a tied head": (
        "smollm2",
        {"target_modules": ["embed_tokens", "lm_head"], "r": 4},
    ),
    "DoRA of an embedding": (
        "llama3-gqa",
        {"target_modules": ["embed_tokens", "q_proj"], "r": 4, "use_dora": True},
    ),
    "tokens": ("llama3-gqa", LORA | {"trainable_token_indices": [int(TOKENS[0]), 7]}),
    "tokens of a tie": (
        "smollm2",
        LORA | {"trainable_token_indices": {"embed_tokens": [int(TOKENS[0]), 7]}},
    ),
    "all biases": ("qwen2", LORA | {"bias": "all"}),
    "biases of matrices": ("qwen2", LORA | {"bias": "lora_only"}),
    "added to biases": ("qwen2", LORA | {"lora_bias": True}),
    "biases that the model lacks": (
        "llama3-gqa",
        {"target_modules": ["q_proj", "o_proj", "down_proj"], "r": 4, "lora_bias": True},
    ),
}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OWN |= {
    "experts": (
        "mixtral",
        {"target_modules": QKV, "target_parameters": PARAMETERS, "r": 3, "lora_alpha": 6},
    ),
    "gates and ups of experts": (
        "qwen3-moe",
        {
            "target_modules": QKV,
            "target_parameters": PARAMETERS[:1],
            "r": 2,
            "alpha_pattern": {"mlp.experts.gate_up_proj": 3},
        },
    ),
    "transposed experts": (
        "gpt-oss",
        {"target_modules": QKV, "target_parameters": PARAMETERS, "r": 2},
    ),
    "experts after a dense layer": (
        "deepseek-v3",
        {"target_modules": ["kv_b_proj"], "target_parameters": PARAMETERS[1:], "r": 2},
    ),
}
_CHANGED = ("lora_", "modules_to_save", "trainable_tokens_delta")


def save_adapter(model: Any, folder: Path, **options: Any) -> Any:
    """Save a random adapter with PEFT; returns the model with it."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    torch.manual_seed(1)
    trains_biases = options.get("bias", "none") != "none"
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            noise = (0.2 * torch.randn_like(parameter)).bfloat16()  # as `cpu` keeps it
            if "magnitude" in name:
                parameter.mul_(1 + noise)
            elif "lora_" in name:
                parameter.copy_(noise)
            elif any(part in name for part in _CHANGED) or (
                trains_biases and parameter.requires_grad and name.endswith("bias")
            ):
                parameter.add_(noise)
    adapted.save_pretrained(folder)
    return adapted


def our_logits(
    checkpoint: Checkpoint, folder: Path | None, backend: str, groups: int
) -> NDArray[np.float32]:
    """Logits of two sequences of the same tokens, with the adapter and without."""
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    executable = compile_program(
        backend, program, checkpoint.tensors, KvConfig((8,) * groups, 32, "f32"), 1
    )
    batch = batch_of(
        [Sequence([0, 2], 32), Sequence([5, 1], 32)],
        [TOKENS, TOKENS],
        [([], []), ([], [])],
        False,
        groups,
    )
    if folder:
        number = executable.add_adapter(read_adapter(folder, checkpoint.spec))
        batch = batch._replace(adapters=ints([number, -1]))
    logits = executable.launch(batch, logits=True).wait().logits
    assert logits is not None
    return logits.reshape(2, len(TOKENS), -1).copy()


def distance(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    variant, options = CASES[case]
    model = save_model(variant, tmp_path / "model")
    base = logits_of(model, TOKENS)
    adapted = save_adapter(model, tmp_path / "adapter", **options)
    want = logits_of(adapted, TOKENS)
    checkpoint, groups = open_checkpoint(tmp_path / "model"), VARIANTS[variant].kv_groups
    with_it, without = our_logits(checkpoint, tmp_path / "adapter", "reference", groups)
    assert distance(with_it, want) < 1e-4 and distance(without, base) < 1e-4
    assert distance(with_it, without) > 0.02, "the adapter changes something"
    fast, fast_without = our_logits(checkpoint, tmp_path / "adapter", "cpu", groups)
    assert distance(fast, with_it) < 1e-4
    assert (fast_without == our_logits(checkpoint, None, "cpu", groups)[1]).all()
    if case != "a tied head":  # which PEFT merges into the embedding, too
        assert distance(with_it, logits_of(adapted.merge_and_unload(), TOKENS)) < 1e-3


@pytest.mark.parametrize("case", OWN)
def test_weights_of_an_adapter_are_those_of_peft(case: str, tmp_path: Path) -> None:
    variant, options = OWN[case]
    model = save_model(variant, tmp_path / "model")
    base = logits_of(model, TOKENS)
    want = logits_of(save_adapter(model, tmp_path / "adapter", **options), TOKENS)
    checkpoint, groups = open_checkpoint(tmp_path / "model"), VARIANTS[variant].kv_groups
    with_it, without = our_logits(checkpoint, tmp_path / "adapter", "reference", groups)
    assert distance(with_it, want) < 1e-4 and distance(without, base) < 1e-4
    assert distance(with_it, without) > 0.01, "the adapter changes something"
    fast, fast_without = our_logits(checkpoint, tmp_path / "adapter", "cpu", groups)
    assert distance(fast, with_it) < 1e-4
    assert (fast_without == our_logits(checkpoint, None, "cpu", groups)[1]).all()


MERGED = [
    "DoRA of fused matrices",
    "DoRA, columns first",
    "norms",
    "a head apart from a tied embedding",
    "embedding and a tied head",
    "tokens of a tie",
    "all biases",
    "experts",
    "transposed experts",
    "experts after a dense layer",
]


@pytest.mark.parametrize("case", MERGED)
def test_conversion_merges_an_adapter(case: str, tmp_path: Path) -> None:
    variant, options = OWN[case]
    model = save_model(variant, tmp_path / "model")
    want = logits_of(save_adapter(model, tmp_path / "adapter", **options), TOKENS)
    command = ["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "f32"]
    assert main([*command, "--merge-adapter", str(tmp_path / "adapter")]) == 0
    groups = VARIANTS[variant].kv_groups
    got, _ = our_logits(open_checkpoint(tmp_path / "out"), None, "reference", groups)
    assert distance(got, want) < 1e-4


def test_biases_that_files_lack_are_not_merged(tmp_path: Path) -> None:
    variant, options = OWN["biases that the model lacks"]
    save_adapter(save_model(variant, tmp_path / "model"), tmp_path / "adapter", **options)
    source = open_source_model(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"the adapter has layers\.0\.down_bias"):
        merged(source, read_adapter(tmp_path / "adapter", source.spec))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    folder = tmp_path_factory.mktemp("saved")
    save_adapter(
        save_model("llama3-gqa", folder / "model"), folder / "adapter", target_modules=QKV, r=4
    )
    return open_checkpoint(folder / "model"), folder / "adapter"


Tensors = dict[str, NDArray[np.float32]]
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("_A", "_B")


def changed(key: str, value: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: config.update({key: value})


def without(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: tensors.pop(name)  # type: ignore[func-returns-value]


def having(name: str, *shape: int) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: tensors.update({name: np.zeros(shape, np.float32)})


def both(*changes: Callable[[dict[str, Any], Tensors], None]) -> Callable[[Any, Any], None]:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        for each in changes:
            each(config, tensors)

    return change


REFUSED: dict[str, tuple[Callable[[dict[str, Any], Tensors], object], type[ModelError], str]] = {
    "another method": (changed("peft_type", "IA3"), UnsupportedModelError, "peft_type = IA3"),
    "DoRA without magnitudes": (
        changed("use_dora", True),
        FormatError,
        "q_proj has no magnitude vector",
    ),
    "magnitudes without DoRA": (
        having(A.replace("lora_A.weight", "lora_magnitude_vector"), 64),
        FormatError,
        "use_dora = False",
    ),
    "biases of another model": (
        having(B.replace("weight", "bias"), 65),
        FormatError,
        r"lora_B.bias of layers.0.self_attn.q_proj has 65 rows, but the model needs 64",
    ),
    "biases": (changed("bias", "some"), UnsupportedModelError, "bias = some"),
    "a module that is missing": (
        changed("modules_to_save", ["lm_head"]),
        FormatError,
        "modules_to_save has lm_head, and adapter_model.safetensors has no tensor of it",
    ),
    "a head of more tokens": (
        having("base_model.model.lm_head.weight", 105, 64),
        UnsupportedModelError,
        "lm_head.weight has 105 rows, but the vocabulary 101",
    ),
    "a classifier": (
        having("base_model.model.score.weight", 2, 64),
        UnsupportedModelError,
        r"score.weight \(weight\) is not a module",
    ),
    "two adapters": (
        both(
            having(A.replace("lora_A", "lora_A.one"), 4, 64),
            having(B.replace("lora_B", "lora_B.two"), 64, 4),
        ),
        FormatError,
        "the adapters one, two are in one file",
    ),
    "the same module twice": (
        having(A.removeprefix("base_model.model."), 4, 64),
        FormatError,
        "two tensors are lora_A of layers.0.self_attn.q_proj",
    ),
    "tokens without ids": (
        having("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 64),
        FormatError,
        "trainable_token_indices has no list of token ids",
    ),
    "tokens beyond the vocabulary": (
        both(
            changed("trainable_token_indices", [3, 101]),
            having(
                "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 64
            ),
        ),
        FormatError,
        "2 rows for 2 tokens up to 101, and the model has 101 tokens",
    ),
    "changed base weights": (
        changed("init_lora_weights", "pissa"),
        UnsupportedModelError,
        "init_lora_weights = pissa",
    ),
    "what comes in later versions": (
        changed("use_magic", {"a": 1}),
        UnsupportedModelError,
        "use_magic",
    ),
    "a pattern": (
        changed("alpha_pattern", {"(a+)+$": 3}),
        UnsupportedModelError,
        "regular expression",
    ),
    "a scale that is none": (changed("lora_alpha", "x"), FormatError, "lora_alpha"),
    "half a module": (without(B), FormatError, r"has lora_A \[4, 64\]"),
    "ranks that differ": (having(B, 64, 5), FormatError, r"has lora_A \[4, 64\], lora_B \[64, 5\]"),
    "columns of another model": (
        having(A, 4, 65),
        FormatError,
        "has 65 columns, but the model needs 64",
    ),
    "rows of another model": (having(B, 32, 4), FormatError, "has 32 rows"),
    "more rows": (having(B, 65, 4), FormatError, "has 65 rows, but the model needs 64"),
    "a layer too many": (having(A.replace("layers.0", "layers.7"), 4, 64), FormatError, "layers.7"),
    "half an embedding": (
        having("base_model.model.model.embed_tokens.lora_embedding_A", 4, 101),
        FormatError,
        r"embed_tokens has A \[4, 101\]; expected both",
    ),
    "an unknown tensor": (
        having("base_model.model.model.layers.0.self_attn.q_proj.lora_E", 4, 1),
        UnsupportedModelError,
        "lora_E is not a known part of a LoRA adapter",
    ),
    "a high rank": (having(A, 2000, 64), FormatError, "up to 1,024"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_adapters(case: str, saved: tuple[Checkpoint, Path], tmp_path: Path) -> None:
    checkpoint, folder = saved
    change, error, message = REFUSED[case]
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(error, match=message):
        read_adapter(tmp_path, checkpoint.spec)


def test_folders_without_an_adapter(saved: tuple[Checkpoint, Path], tmp_path: Path) -> None:
    checkpoint, folder = saved
    with pytest.raises(
        ModelNotFoundError, match=r"no adapter_config.json; name the folder that PEFT or mlx-lm"
    ):
        read_adapter(tmp_path, checkpoint.spec)
    (tmp_path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    with pytest.raises(ModelNotFoundError, match=r"no adapter_model.safetensors"):
        read_adapter(tmp_path, checkpoint.spec)


def test_adapters_of_single_experts(tmp_path: Path) -> None:
    """The names of transformers 4, which has a module for each expert."""
    model = save_model("mixtral", tmp_path / "model")
    base, rng = model.state_dict(), np.random.default_rng(0)
    prefix = "base_model.model.model.layers.1.block_sparse_moe.experts.1"
    tensors, fused = {}, base["model.layers.1.mlp.experts.gate_up_proj"]
    for half, name in enumerate(("w1", "w3")):
        rows = fused.shape[1] // 2
        a, b = (
            rng.standard_normal(shape, np.float32) / 4 for shape in ((2, fused.shape[2]), (rows, 2))
        )
        tensors |= {f"{prefix}.{name}.lora_A.weight": a, f"{prefix}.{name}.lora_B.weight": b}
        fused[1, half * rows : (half + 1) * rows] += torch.from_numpy(2 * b @ a)
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    want = logits_of(model, TOKENS)
    with_it, without = our_logits(
        open_checkpoint(tmp_path / "model"), tmp_path / "adapter", "reference", 1
    )
    assert distance(with_it, want) < 1e-4 < distance(without, want)


def test_experts_of_a_quantised_model(tmp_path: Path) -> None:
    """Experts that change become bf16, and all others of their layer with them."""
    variant, options = OWN["gates and ups of experts"]
    save_adapter(save_model(variant, tmp_path / "model"), tmp_path / "adapter", **options)
    checkpoint = open_checkpoint(tmp_path / "model")
    quantised = {
        name: in_q8_0(name, tensor) if ".experts." in name else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    checkpoint = replace(checkpoint, tensors=quantised)
    want, without = our_logits(checkpoint, tmp_path / "adapter", "reference", 1)
    got, _ = our_logits(checkpoint, tmp_path / "adapter", "cpu", 1)
    assert distance(got, want) < 0.03 < distance(want, without)


def in_q8_0(name: str, tensor: StoredTensor) -> StoredTensor:
    data = encode("Q8_0", tensor.dequantise())
    return StoredTensor.from_bytes(name, FORMATS["Q8_0"], tensor.shape, data)
