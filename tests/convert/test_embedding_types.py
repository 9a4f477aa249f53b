"""Embeddings and heads in the formats of --token-embedding-type and --output-tensor-type."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.load import open_checkpoint
from headrace.cli import convert
from headrace.convert.embedding_types import folder_types, gguf_types
from headrace.errors import RequestError
from tests.checkpoint.conftest import write_tiny_gguf
from tests.convert.test_folder import check_same, written
from tests.families import save_model, spec_of

MODELS = {"tied": "gemma2", "untied": "llama2-mha"}
VOCABULARIES = (101, 128)
"""Odd, and padded."""
HEAD = np.random.default_rng(0).standard_normal((264, 64)).astype(np.float32)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(MODELS[request.param], folder)
    return folder


def converted(model: Path, out: Path, *words: str) -> dict[str, Any]:
    """Convert by the command line; returns the `quantization_config`, or nothing for a file."""
    parser = ArgumentParser()
    convert.configure(parser)
    assert convert.run(parser.parse_args([str(model), str(out), *words])) == 0
    if out.is_file():
        return {}
    config: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
    return config


@pytest.mark.parametrize("to", ["int4-row", "w8a8", "e4m3-row"])
@pytest.mark.parametrize("form", ["int8-row", "int8-g32", "int4-g64", "int3-g32-asym", "int2-g16"])
def test_quantised_embeddings_are_read_again(
    model: Path, form: str, to: str, tmp_path: Path
) -> None:
    spec = open_checkpoint(model).spec
    types = folder_types(spec, to, form, None if spec.tied_embeddings else "int8-g16")
    original, made = written(model, to, tmp_path / "out", types)
    assert made.keys() >= types.keys() == ({"embed"} if spec.tied_embeddings else {"embed", "head"})
    check_same(original, made, tmp_path / "out")


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_rows_of_any_number(vocabulary: int, tmp_path: Path) -> None:
    save_model("gemma2", tmp_path / "model", vocab_size=vocabulary)
    original, made = written(
        tmp_path / "model", "int4-row", tmp_path / "out", {"embed": "int3-row-asym"}
    )
    assert made["embed"].rows == vocabulary
    check_same(original, made, tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "embedding"),
    [
        ("int4-g32", "int8 by row, f16"),
        ("int2-row-asym", "int8 by row, f16"),
        ("int8-g32", "int8 g32, f16"),
        ("w8a8", "F32"),
        ("e4m3-row", "F32"),
        ("nf4-g32", "F32"),
    ],
)
def test_the_default_is_8_bits_next_to_integers(
    model: Path, to: str, embedding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = converted(model, tmp_path / "out", "--to", to)
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert {tensors[name].format.name for name in ("embed", "head") if name in tensors} == {
        embedding
    }
    told = capsys.readouterr().out
    assert ("head: " if "head" in tensors else "embedding and head: ") + embedding in told
    # transformers reads packed embeddings of one format only.
    assert config.get("dequantize", False) == (to == "int8-g32")
    assert ("transformers cannot load it; with --token-embedding-type bf16" in told) == (
        embedding == "int8 by row, f16"
    )


@pytest.mark.parametrize(
    ("to", "remedy"),
    [("w8a8", "--token-embedding-type int8-row"), ("nf4-g32", "a GGUF file (--to Q4_K_M)")],
)
def test_large_plain_embeddings_have_a_remedy(
    to: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model("gemma2", tmp_path / "model", vocab_size=2048)
    converted(tmp_path / "model", tmp_path / "out", "--to", to)
    assert f"0.5 MB; {remedy} makes it smaller" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["bf16", "F16", "f32"])
def test_plain_embeddings(model: Path, form: str, tmp_path: Path) -> None:
    words = ["--token-embedding-type", form]
    if not open_checkpoint(model).spec.tied_embeddings:
        words += ["--output-tensor-type", form]
    config = converted(model, tmp_path / "out", "--to", "int4-g32", *words)
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert {tensors[name].format.name for name in ("embed", "head") if name in tensors} == {
        form.upper()
    }
    assert len(config["config_groups"]) == 1 and "dequantize" not in config
    assert "lm_head" in config["ignore"] and "model.embed_tokens" in config["ignore"]


def test_a_head_of_another_format_than_the_embedding(tmp_path: Path) -> None:
    save_model("llama2-mha", tmp_path / "model")
    words = ("--token-embedding-type", "bf16", "--output-tensor-type", "int8-g16")
    config = converted(tmp_path / "model", tmp_path / "out", "--to", "int4-g32", *words)
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert (tensors["embed"].format.name, tensors["head"].format.name) == ("BF16", "int8 g16, f16")
    assert [group["targets"] for group in config["config_groups"].values()] == [
        ["Linear"],
        ["lm_head"],
    ]
    assert config["ignore"] == ["model.embed_tokens"]


@pytest.mark.parametrize("mixture", ["Q8_0", "F16"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_gguf_files(is_tied: bool, mixture: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    write_tiny_gguf(source, weights=None if is_tied else {"output.weight": HEAD})
    converted(source, out, "--to", mixture, "--token-embedding-type", "q5_0")
    tensors = open_checkpoint(out).tensors
    assert tensors["embed"].format.name == "Q5_0" and ("head" in tensors) != is_tied
    assert is_tied or tensors["head"].format.name == mixture
    assert tensors["layers.0.q"].format.name == mixture


@pytest.mark.parametrize(
    ("family", "to", "embedding", "head", "message"),
    [
        ("llama2-mha", "int4-g32", "int5-g32", None, "--token-embedding-type: unknown format"),
        ("llama2-mha", "int4-g32", None, "nf4-g64", "--output-tensor-type nf4-g64: no folder has"),
        ("llama2-mha", "int4-g32", "w8a8", None, "no folder has such embeddings; use int2"),
        ("llama2-mha", "nf4", "int8-row", None, r"bitsandbytes \(--to nf4\) has no quantised"),
        ("llama2-mha", "llm-int8", None, "int8-row", "bitsandbytes"),
        ("gemma2", "int4-g32", "int8-row", "int4-g32", "one matrix for both; give one of them"),
    ],
)
def test_wrong_formats_in_folders(
    family: str, to: str, embedding: str | None, head: str | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        folder_types(spec_of(family), to, embedding, head)


@pytest.mark.parametrize("words", [("Q9_K", "Q8_0"), ("int8-row", "F16"), ("Q6_K", "use one of")])
def test_wrong_formats_in_gguf_files(words: tuple[str, str]) -> None:
    name, expected = words
    with pytest.raises(RequestError, match=f"--token-embedding-type '{name}'.*{expected}"):
        gguf_types(spec_of("llama2-mha"), name, None)


def test_groups_that_do_not_divide_an_embedding(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="64 columns, not a multiple of"):
        converted(
            model, tmp_path / "out", "--to", "int4-g32", "--token-embedding-type", "int8-g128"
        )
    assert not (tmp_path / "out").exists()


def test_types_need_quantised_matrices(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--to bf16 has none; leave them out"):
        converted(model, tmp_path / "out", "--to", "bf16", "--token-embedding-type", "int8-row")
