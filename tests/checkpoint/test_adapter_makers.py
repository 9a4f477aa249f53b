"""Adapters of several makers, with the same matrices, are the same changes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.load import open_checkpoint
from headrace.cli.main import main
from headrace.errors import FormatError, ModelError, ModelNotFoundError, UnsupportedModelError
from headrace.model import FAMILIES
from headrace.model.spec import ExpertSpec
from headrace.program.adapter import Adapter, LowRank, OwnWeight
from headrace.quant.formats import StoredTensor
from tests.fuzz.files import tiny_gguf
from tests.tiny import tiny_model

Floats = NDArray[np.float32]
SPEC, TENSORS = tiny_model(0)
TIED, _ = tiny_model(0, tied_embeddings=True)
DIM, KV_ROWS, VOCAB, RANK = 32, 16, 61, 4
Q, V = "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
ROWS = {Q: DIM, V: KV_ROWS}


def matrix(*shape: int) -> Floats:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def pair(module: str) -> tuple[Floats, Floats]:
    return matrix(RANK, DIM), matrix(ROWS[module], RANK)


def peft_folder(folder: Path, tensors: Mapping[str, Floats], **config: Any) -> Path:
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(
        {name: np.ascontiguousarray(t) for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def mlx_folder(folder: Path, tensors: Mapping[str, Floats], **config: Any) -> Path:
    given = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": RANK, "scale": 2.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps({**given, **config}))
    save_file(
        {name: np.ascontiguousarray(t) for name, t in tensors.items()},
        folder / "adapters.safetensors",
    )
    return folder


def gguf_file(path: Path, tensors: Mapping[str, Floats], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, metadata.get("architecture", "llama"))
    writer.add_string("general.type", metadata.get("type", "adapter"))
    writer.add_string("adapter.type", metadata.get("adapter_type", "lora"))
    if alpha := metadata.get("alpha", 8.0):
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def lora(prefix: str = "base_model.model.", infix: str = "") -> dict[str, Floats]:
    return {
        f"{prefix}{module}.lora_{half}{infix}.weight": matrix_
        for module in ROWS
        for half, matrix_ in zip("AB", pair(module), strict=True)
    }


def same(found: Adapter, wanted: Adapter) -> None:
    assert found.keys() == wanted.keys()
    for name, change in found.items():
        other = wanted[name]
        if isinstance(change, LowRank):
            assert isinstance(other, LowRank)
            np.testing.assert_allclose(
                change.scale * change.up @ change.down, other.scale * other.up @ other.down
            )
        else:
            assert isinstance(other, OwnWeight)
            base = TENSORS.get("embed" if name == "head" else name)
            np.testing.assert_allclose(
                change.make(name, base).dequantise(), other.make(name, base).dequantise(), rtol=1e-6
            )


NAMES: dict[str, dict[str, Floats]] = {
    "without a prefix": lora(""),
    "without the model's prefix": {
        name.replace("model.layers", "layers"): tensor for name, tensor in lora("").items()
    },
    "with the adapter's name": lora(infix=".default"),
    "in a language model": {
        name.replace("model.layers", "model.language_model.layers"): tensor
        for name, tensor in lora().items()
    },
    "in a language model, first": lora("base_model.model.language_model."),
    "in a text model": lora("base_model.model.model.text_model."),
    "next to an image encoder": lora()
    | {"base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight": matrix(4, 48)}
    | {"base_model.model.model.visual.blocks.0.attn.qkv.lora_B.weight": matrix(96, 4)},
}


@pytest.mark.parametrize("case", NAMES)
def test_prefixes_of_other_makers(case: str, tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    wanted = read_adapter(peft_folder(tmp_path / "usual", lora()), SPEC)
    assert wanted.keys() == {"layers.1.q", "layers.0.v"}
    same(read_adapter(peft_folder(tmp_path, NAMES[case]), SPEC), wanted)


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 2},
        {"^model.layers.1.self_attn.q_proj$": 2},
        {r"layers\.1\.self_attn\.q_proj": 2},
        {r".*\.layers\.1\..*(q_proj|k_proj)$": 2},
        {r"^model\.layers\.\d+\.self_attn\.(?:q|k)_proj": 2},
    ],
)
def test_alpha_patterns(patterns: dict[str, float], tmp_path: Path) -> None:
    adapter = read_adapter(peft_folder(tmp_path, lora(), alpha_pattern=patterns), SPEC)
    scales = {name: change.scale for name, change in adapter.items() if isinstance(change, LowRank)}
    assert scales == {"layers.1.q": 0.5, "layers.0.v": 2.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": False, "velora_config": None, "future": {}, "other": 0, "last": ""},
        {"unsloth_fixed": True},
    ],
)
def test_fields_without_effect_are_ignored(fields: dict[str, Any], tmp_path: Path) -> None:
    assert len(read_adapter(peft_folder(tmp_path, lora(), **fields), SPEC)) == 2


def test_mlx_matrices_equal_those_of_peft(tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    wanted = read_adapter(peft_folder(tmp_path / "peft", lora()), SPEC)
    tensors = {
        f"{module}.lora_{half}": part.T
        for module in ROWS
        for half, part in zip("ab", pair(module), strict=True)
    }
    same(read_adapter(mlx_folder(tmp_path, tensors), SPEC), wanted)


def test_alpha_of_older_mlx_adapters(tmp_path: Path) -> None:
    parameters = {"rank": RANK, "alpha": 16.0, "scale": 10.0}
    (change,) = read_adapter(
        mlx_folder(tmp_path, MLX_PAIR, lora_parameters=parameters), SPEC
    ).values()
    assert isinstance(change, LowRank) and change.scale == 40.0


def test_gguf_norms_are_whole_weights(tmp_path: Path) -> None:
    tensors = {"blk.1.ffn_norm.weight": matrix(DIM), "output_norm.weight": matrix(DIM)}
    found = read_adapter(gguf_file(tmp_path / "a.gguf", tensors), SPEC)
    assert found.keys() == {"layers.1.mlp_norm", "norm"}
    for own in found.values():
        assert isinstance(own, OwnWeight)
        assert (own.make("x", None).dequantise() == matrix(DIM)).all()


def test_mlx_magnitudes_equal_those_of_peft(tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    norms = {module: np.abs(matrix(rows)) + 1 for module, rows in ROWS.items()}
    theirs = lora() | {f"{module}.lora_magnitude_vector": norm for module, norm in norms.items()}
    wanted = read_adapter(peft_folder(tmp_path / "peft", theirs, use_dora=True), SPEC)
    tensors = {
        f"{module}.lora_{half}": part.T
        for module in ROWS
        for half, part in zip("ab", pair(module), strict=True)
    } | {f"{module}.m": norm for module, norm in norms.items()}
    found = read_adapter(mlx_folder(tmp_path, tensors, fine_tune_type="dora"), SPEC)
    same(found, wanted)
    assert all(isinstance(change, OwnWeight) for change in found.values())


def test_mlx_full_weights(tmp_path: Path) -> None:
    weights = {f"{Q}.weight": matrix(DIM, DIM), "model.norm.weight": matrix(DIM)}
    found = read_adapter(mlx_folder(tmp_path, weights, fine_tune_type="full"), SPEC)
    layout = FAMILIES["llama"].config
    assert layout and found.keys() == {"layers.1.q", "norm"}
    place, numbers = layout.source_of("layers.1.q")
    assert place.rows
    own = found["layers.1.q"]
    assert isinstance(own, OwnWeight) and own.values
    assert (own.values.dequantise() == matrix(DIM, DIM)[place.rows(SPEC, numbers)]).all()


def embedding_matrices() -> tuple[Floats, Floats]:
    return matrix(VOCAB, RANK), matrix(RANK, DIM)


def test_embedding_matrices(tmp_path: Path) -> None:
    """mlx-lm changes a tied head with its embedding; PEFT and llama.cpp do not."""
    a, b = embedding_matrices()
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    for folder in ("peft", "mlx"):
        (tmp_path / folder).mkdir()
    peft = peft_folder(tmp_path / "peft", {f"{name}A": a.T, f"{name}B": b.T})
    tensors = {"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b}
    mlx = mlx_folder(tmp_path / "mlx", tensors)
    tensors = {"token_embd.weight.lora_a": a, "token_embd.weight.lora_b": b.T}
    file = gguf_file(tmp_path / "a.gguf", tensors)
    change = TENSORS["embed"].dequantise() + 2.0 * a @ b
    for path, names in ((peft, {"embed"}), (file, {"embed"}), (mlx, {"embed", "head"})):
        assert read_adapter(path, SPEC).keys() == {"embed"}
        found = read_adapter(path, TIED)
        assert found.keys() == names
        for own in found.values():
            assert isinstance(own, OwnWeight)
            made = own.make("embed", TENSORS["embed"]).dequantise()
            np.testing.assert_allclose(made, change, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("alpha", "scale"), [(8.0, 2.0), (0.0, 1.0)])
def test_gguf_matrices_equal_those_of_peft(alpha: float, scale: float, tmp_path: Path) -> None:
    wanted = read_adapter(peft_folder(tmp_path, lora(), lora_alpha=scale * RANK), SPEC)
    tensors = {}
    for ours, theirs in (("layers.1.q", "blk.1.attn_q"), ("layers.0.v", "blk.0.attn_v")):
        # Converters write rows in the order of the model's file, which is ours for llama.
        change = wanted[ours]
        assert isinstance(change, LowRank)
        tensors |= {f"{theirs}.weight.lora_a": change.down, f"{theirs}.weight.lora_b": change.up}
    same(read_adapter(gguf_file(tmp_path / "a.gguf", tensors, alpha=alpha), SPEC), wanted)


GOOD = {"blk.0.attn_q.weight.lora_a": matrix(4, DIM), "blk.0.attn_q.weight.lora_b": matrix(DIM, 4)}
REFUSED_FILES: dict[str, tuple[dict[str, Floats], dict[str, Any], type[ModelError], str]] = {
    "a model": (
        GOOD,
        {"type": "model", "adapter_type": "none"},
        UnsupportedModelError,
        "adapter.type",
    ),
    "a control vector": (GOOD, {"adapter_type": "vector"}, UnsupportedModelError, "lora is"),
    "another architecture": (
        GOOD,
        {"architecture": "qwen2"},
        UnsupportedModelError,
        "the adapter is for a qwen2 model, and the model is llama",
    ),
    "half": (
        {"blk.0.attn_q.weight.lora_a": matrix(4, DIM)},
        {},
        FormatError,
        r"attn_q has lora_a \[4, 32\]; expected both",
    ),
    "half of the experts' matrices": (
        {"blk.0.ffn_up_exps.weight.lora_a": matrix(2, 4, DIM)},
        {},
        FormatError,
        r"ffn_up_exps has a \[2, 4, 32\]; expected both matrices of all experts",
    ),
    "experts that the model lacks": (
        {
            "blk.0.ffn_up_exps.weight.lora_a": matrix(2, 4, DIM),
            "blk.0.ffn_up_exps.weight.lora_b": matrix(2, 8, 4),
        },
        {},
        UnsupportedModelError,
        r"0.up \(experts\) is not a module of a llama model",
    ),
    "another layer": (
        {name.replace("blk.0", "blk.7"): tensor for name, tensor in GOOD.items()},
        {},
        UnsupportedModelError,
        r"blk.7.attn_q \(low-rank\) is not a module of a llama model with 2 layers",
    ),
    "nothing": ({}, {}, FormatError, "no tensors"),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_refused_files(case: str, tmp_path: Path) -> None:
    tensors, metadata, error, message = REFUSED_FILES[case]
    with pytest.raises(error, match=message):
        read_adapter(gguf_file(tmp_path / "a.gguf", tensors, **metadata), SPEC)


COUNT, FFN = 3, 24
MIXTRAL = replace(
    SPEC, architecture="mixtral", experts=ExpertSpec(num_experts=COUNT, top_k=2, ffn_dim=FFN)
)
EXPERTS = {"gate": (FFN, DIM), "up": (FFN, DIM), "down": (DIM, FFN)}


def products(adapter: Adapter) -> dict[str, Floats]:
    """What is added to each weight of the experts."""
    found = {}
    for name, change in adapter.items():
        assert isinstance(change, OwnWeight) and change.delta
        down, up, scale = change.delta
        found[name] = scale * up @ down
    return found


def test_stacked_experts_of_all_makers(tmp_path: Path) -> None:
    """PEFT's, mlx-lm's and llama.cpp's forms of the same matrices, scaled by 2."""
    peft, mlx, ggml, fused = (dict[str, Floats]() for _ in range(4))
    for part, (rows, cols) in EXPERTS.items():
        a, b = matrix(COUNT, RANK, cols), matrix(COUNT, rows, RANK)
        name = {"gate": "w1", "up": "w3", "down": "w2"}[part]
        for expert in range(COUNT):
            module = f"model.layers.1.block_sparse_moe.experts.{expert}.{name}"
            peft |= {f"{module}.lora_A.weight": a[expert], f"{module}.lora_B.weight": b[expert]}
        module = f"model.layers.1.block_sparse_moe.switch_mlp.{part}_proj"
        mlx |= {f"{module}.lora_a": a.reshape(-1, cols), f"{module}.lora_b": b}
        module = f"blk.1.ffn_{part}_exps.weight"
        ggml |= {f"{module}.lora_a": a, f"{module}.lora_b": b}
        if part == "down":
            module = "model.layers.1.mlp.experts"
            fused[f"{module}.lora_A.weight"] = a.reshape(-1, cols)
            fused[f"{module}.lora_B.weight"] = b.transpose(1, 2, 0).reshape(rows, -1)
    for name in ("peft", "mlx", "fused", "swapped"):
        (tmp_path / name).mkdir()
    wanted = products(read_adapter(peft_folder(tmp_path / "peft", peft), MIXTRAL))
    assert len(wanted) == 3 * COUNT
    names = {"target_parameters": ["mlp.experts.down_proj"]}
    # Some versions of PEFT take the columns of a stored matrix for its rows.
    swapped = {
        "model.layers.1.mlp.experts.lora_A.weight": matrix(COUNT, DIM, RANK)
        .transpose(0, 2, 1)
        .reshape(-1, DIM),
        "model.layers.1.mlp.experts.lora_B.weight": matrix(COUNT, RANK, FFN)
        .transpose(2, 1, 0)
        .reshape(FFN, -1),
    }
    llama = replace(MIXTRAL, architecture="llama")
    for found in (
        read_adapter(mlx_folder(tmp_path / "mlx", mlx), MIXTRAL),
        read_adapter(gguf_file(tmp_path / "a.gguf", ggml), llama),
        read_adapter(peft_folder(tmp_path / "fused", fused, **names), MIXTRAL),
        read_adapter(peft_folder(tmp_path / "swapped", swapped, **names), MIXTRAL),
    ):
        for name, values in products(found).items():
            np.testing.assert_allclose(values, wanted[name], rtol=1e-5, err_msg=name)


def test_refused_experts(tmp_path: Path) -> None:
    module = "model.layers.1.mlp.experts"
    pair = {f"{module}.lora_A.weight": matrix(6, 9), f"{module}.lora_B.weight": matrix(DIM, 6)}
    for names, error, message in (
        (["mlp.experts.down_proj"], FormatError, "load the model that it was trained for"),
        (["mlp.experts.magic"], UnsupportedModelError, "target_parameters has magic"),
        (["mlp.experts.down_proj", "mlp.experts.gate_up_proj"], FormatError, "lacks matrices of"),
        ([], UnsupportedModelError, "target_parameters has no parameter"),
    ):
        with pytest.raises(error, match=message):
            read_adapter(peft_folder(tmp_path, pair, target_parameters=names), MIXTRAL)


MLX_PAIR = {f"{V}.lora_a": matrix(DIM, 4), f"{V}.lora_b": matrix(4, KV_ROWS)}
REFUSED_MLX: dict[str, tuple[dict[str, Floats], dict[str, Any], str]] = {
    "another type": (
        MLX_PAIR,
        {"fine_tune_type": "ia3"},
        "fine_tune_type = ia3 .* lora, dora, full are",
    ),
    "DoRA without magnitudes": (MLX_PAIR, {"fine_tune_type": "dora"}, "lacks its matrices or its"),
    "magnitudes without DoRA": (
        MLX_PAIR | {f"{V}.m": matrix(KV_ROWS)},
        {},
        r"has magnitudes \(m\)",
    ),
    "an unknown tensor": ({"x.y": matrix(2, 2)}, {}, "tensor x.y is not a part of an adapter"),
    "one half": ({f"{V}.lora_a": matrix(DIM, 4)}, {}, r"has lora_a \[4, 32\]; expected both"),
    "twice": (
        MLX_PAIR | {f"language_model.{V}.lora_a": matrix(DIM, 4)},
        {},
        "two tensors are lora_a of layers.0",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MLX)
def test_refused_mlx_folders(case: str, tmp_path: Path) -> None:
    tensors, config, message = REFUSED_MLX[case]
    with pytest.raises((FormatError, UnsupportedModelError), match=message):
        read_adapter(mlx_folder(tmp_path, tensors, **config), SPEC)


def folder_adapter(path: Path) -> Path:
    return peft_folder(path, lora())


def file_adapter(path: Path) -> Path:
    return gguf_file(path / "a.gguf", GOOD)


@pytest.mark.parametrize("make", [folder_adapter, file_adapter])
def test_an_adapter_in_place_of_a_model_gets_a_hint(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(
        (ModelNotFoundError, UnsupportedModelError), match=f"LoRA adapter.*--lora NAME={path.name}"
    ):
        open_checkpoint(path)


def test_a_folder_with_a_gguf_adapter_names_it(tmp_path: Path) -> None:
    file_adapter(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"a GGUF file, for example a\.gguf"):
        read_adapter(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("make", "name", "older"),
    [
        (peft_folder, "adapter_model.safetensors", "adapter_model.bin"),
        (mlx_folder, "adapters.safetensors", "adapters.npz"),
    ],
)
def test_files_of_older_versions_are_named(
    make: Callable[..., Path], name: str, older: str, tmp_path: Path
) -> None:
    (make(tmp_path, lora()) / name).rename(tmp_path / older)
    with pytest.raises(
        ModelNotFoundError, match=f"no {name}; {older} is .* save the adapter again"
    ):
        read_adapter(tmp_path, SPEC)


def test_unchanged_embeddings_are_not_stored_again() -> None:
    own = OwnWeight(values=StoredTensor.from_floats("x", TENSORS["embed"].dequantise()))
    assert own.keeps(TENSORS["embed"]) and not own.keeps(TENSORS["head"]) and not own.keeps(None)


def test_conversion_merges_a_gguf_adapter_into_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(tiny_gguf("Q8_0", False))
    base = open_checkpoint(tmp_path / "model.gguf")
    rows, cols = base.tensors["layers.1.o"].shape
    tensors = {
        "blk.1.attn_output.weight.lora_a": matrix(RANK, cols),
        "blk.1.attn_output.weight.lora_b": matrix(rows, RANK),
    }
    adapter = gguf_file(tmp_path / "adapter.gguf", tensors)
    command = ["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out.gguf"), "--to", "F32"]
    assert main([*command, "--merge-adapter", str(adapter)]) == 0
    merged = open_checkpoint(tmp_path / "out.gguf")
    for name, tensor in merged.tensors.items():
        want = base.tensors[name].dequantise()
        if name == "layers.1.o":
            want = want + 2.0 * matrix(rows, RANK) @ matrix(RANK, cols)
        np.testing.assert_allclose(tensor.dequantise(), want, rtol=1e-2, atol=1e-2)
