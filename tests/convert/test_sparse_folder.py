"""Folders of 2:4 sparse matrices: the bytes of compressed-tensors, and models read again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.checkpoint.load import open_checkpoint
from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.convert.folder.sparse import sparse_writer
from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.loader.mode_price import mode_price
from headrace.measure.evaluate import evaluate
from headrace.planner.prices import parse_price
from headrace.quant.format_names import LLM_INT8, named_format
from tests.checkpoint.conftest import write_tiny_gguf
from tests.checkpoint.test_sparse_layouts import LAYERS
from tests.families import save_model
from tests.folders import TOKENS, backends, logits_of

LAYOUTS = {
    "bf16": ("sparse-24-bitmask", "compressed", 9),
    "int8-row": ("sparse-24-bitmask", "compressed", 5),
    "w8a8": ("sparse-24-bitmask", "compressed", 5),
    "int8-g32": ("sparse-24-bitmask", "compressed", 5),
    "int4-g32": ("dense", "weight_packed", 4),
}
"""The layout, a tensor of a matrix, and the bits of a weight in the file, without scales."""


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    kind = torch.uint8 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return tensor.contiguous().view(kind).numpy()


@pytest.mark.parametrize("name", ["bf16", "int8", "int8g"])
def test_bytes_of_the_library(name: str) -> None:
    want = LAYERS[f"want.{name}"]
    if name == "bf16":
        writer = sparse_writer("BF16", "wanda")
        parts = {"codes": numpy_of(want).reshape(*want.shape, 2)}
    else:
        writer = sparse_writer(named_format("int8-row" if name == "int8" else "int8-g32"), "wanda")
        scales = numpy_of(LAYERS[f"{name}.weight_scale"])
        parts = {"codes": want.numpy().view(np.uint8) ^ np.uint8(128), "scales": scales}
    found = writer.packed(f"{name}.weight", parts)
    planned = {part.name: part for part in writer.planned(f"{name}.weight", *want.shape)}
    assert found.keys() == planned.keys() == {key for key in LAYERS if key.startswith(f"{name}.")}
    for key, numbers in found.items():
        assert np.ascontiguousarray(numbers).tobytes() == numpy_of(LAYERS[key]).tobytes(), key
        assert planned[key].nbytes == numbers.nbytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama3-gqa", folder)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_sparse_models_are_read_again(
    name: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, stored, bits = LAYOUTS[name]
    arguments = ["convert", str(llama), "--to", name, str(tmp_path / "out")]
    assert main([*arguments, "--sparsity", "2:4", "--prune", "magnitude"]) == 0
    main(["convert", str(llama), "--to", name, str(tmp_path / "dense")])
    dense, sparse = open_checkpoint(tmp_path / "dense"), open_checkpoint(tmp_path / "out")
    assert sparse.spec.num_layers == dense.spec.num_layers

    num_sparse = num_weights = 0
    for key, tensor in sparse.tensors.items():
        is_sparse = tensor.format.spec is not None and tensor.format.spec.is_sparse
        values = tensor.dequantise()
        if is_sparse:
            num_sparse += 1
            num_weights += values.size
            assert ((values.reshape(-1, 4) != 0).sum(axis=1) <= 2).all()
            if name in ("bf16", "w8a8", "int8-row"):  # the largest weight of a row has its code
                kept = values != 0
                assert np.array_equal(values[kept], dense.tensors[key].dequantise()[kept])
        else:
            assert np.array_equal(values, dense.tensors[key].dequantise())
    assert num_sparse == 7 * sparse.spec.num_layers

    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    sparsity = config["sparsity_config"]
    assert (sparsity["format"], sparsity["sparsity_structure"]) == (layout, "2:4")
    assert "lm_head" in sparsity["ignore"] and sparsity["prune"] == "magnitude"
    assert "out: two of four weights are 0, pruned by magnitude" in sparse.notes[0]
    assert "price not measured: " in capsys.readouterr().out and not sparse.price
    truth, executable = backends(sparse, "")
    exact, got = logits_of(truth, [TOKENS]), logits_of(executable, [TOKENS])
    assert np.linalg.norm(got - exact) < 0.03 * np.linalg.norm(exact)
    assert np.array_equal(got, logits_of(executable, [17, 1, 1, TOKENS - 19]))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    parts = [stored, "bitmask"] if layout != "dense" else [stored]
    nbytes = sum(
        tensor.nbytes
        for key, tensor in tensors.items()
        if key.rsplit(".", 1)[1] in parts and "proj" in key
    )
    assert 8 * nbytes == bits * num_weights


def test_the_price_of_sparse_weights_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    model, out = write_tiny_gguf(tmp_path / "model.gguf"), tmp_path / "out"
    convert = ["convert", str(model), str(out), "--to", "bf16", "--threads", "1"]
    assert main([*convert, "--sparsity", "2:4", "--prune", "magnitude"]) == 0
    sparse = open_checkpoint(out)
    price = parse_price(sparse.price)
    assert price and price.kl > 0 and price.line in capsys.readouterr().out

    unpriced = replace(sparse, price={})
    line = mode_price(str(out), EngineConfig(), unpriced, sparse.load_tokenizer)
    assert line == f"price not measured: run `headrace eval {out} --reference ORIGINAL`"
    evaluate(str(out), reference=str(model), tokens=64, length=32, threads=1)
    line = mode_price(str(out), EngineConfig(), unpriced, sparse.load_tokenizer)
    assert "(62 tokens of Python's language reference)" in line
    with LLM(str(out), threads=1, max_model_len=64, attention_window=32) as llm:
        assert "pruned by magnitude; attends to" in str(llm) and price.line in str(llm)


@pytest.mark.parametrize("name", ["int4-g32-asym", "int3-g32", "nf4", "e4m3-row"])
def test_formats_without_a_sparse_form(name: str) -> None:
    with pytest.raises(RequestError, match=r"has no format with .*; use bf16, int8 or int4"):
        sparse_writer(named_format(name), "wanda")
    with pytest.raises(RequestError, match="does not fit --to llm-int8"):
        sparse_writer(LLM_INT8, "wanda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "bf16", "--sparsity", "1:2"], "--sparsity '1:2' is not supported"),
        (["--to", "bf16", "--prune", "wanda"], "--prune wanda needs --sparsity 2:4"),
        (["--to", "bf16", "--sparsity", "2:4", "--method", "gptq"], "--method gptq rounds to"),
        (["--to", "int4-g32", "--sparsity", "2:4", "--method", "awq"], "--method awq does not"),
    ],
)
def test_refused_commands(
    arguments: list[str],
    message: str,
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["convert", str(llama), str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
