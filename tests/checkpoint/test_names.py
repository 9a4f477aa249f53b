"""Tensors by their published names: prefixes, and heads next to a tie."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace import LLM, SamplingParams
from headrace.checkpoint.head import is_equal
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.names import text_names
from headrace.errors import FormatError, RequestError, UnsupportedModelError
from headrace.measure.evaluate import evaluate
from headrace.model import FAMILIES
from headrace.quant.formats import StoredTensor
from tests.backend.stored import random_stored
from tests.checkpoint.conftest import metadata, write_tiny_gguf
from tests.checkpoint.conftest import tensors as gguf_tensors
from tests.fuzz.files import CONFIG, tensors

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Arrays = Mapping[str, NDArray[Any]]


def arrays(head: bool = False) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    found = {
        name: rng.normal(size=values.shape).astype(np.float16) for name, values in tensors().items()
    }
    return found | {HEAD: rng.normal(size=found[EMBED].shape).astype(np.float16)} if head else found


def write(folder: Path, stored: Arrays, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(stored), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def with_tokenizer(folder: Path) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


def opened(folder: Path, stored: Arrays, **config: Any) -> Checkpoint:
    return open_checkpoint(write(folder, stored, **config))


@pytest.mark.parametrize(
    "prefix",
    [
        "model.",
        "",
        "language_model.",
        "language_model.model.",
        "model.language_model.",
        "model.text_model.",
        "transformer.",
    ],
)
def test_prefixes_of_the_text_model(prefix: str, tmp_path: Path) -> None:
    want = opened(tmp_path / "a", arrays(head=True), tie_word_embeddings=False)
    head = "language_model." if prefix == "language_model.model." else ""
    renamed = {
        head + name if name == HEAD else prefix + name.removeprefix("model."): values
        for name, values in arrays(head=True).items()
    }
    got = opened(tmp_path / "b", renamed, tie_word_embeddings=False)
    assert got.tensors.keys() == want.tensors.keys() and "head" in got.tensors
    for name, tensor in want.tensors.items():
        np.testing.assert_array_equal(got.tensors[name].dequantise(), tensor.dequantise())


@pytest.mark.parametrize("family", [name for name, one in FAMILIES.items() if one.config])
def test_each_family_without_its_prefix(family: str) -> None:
    layout = FAMILIES[family].config
    assert layout
    names = [source.name.replace("{}", "0") for source in layout.tensors.values()]
    base = next(name for name in names if ".0." in name).partition(".")[0] + "."
    bare = {name.removeprefix(base): name for name in names}
    assert text_names(bare, layout).own == bare
    wrapped = {f"language_model.{name}": name for name in names}
    assert text_names(wrapped, layout).own == wrapped


@pytest.mark.parametrize(
    "wrap",
    [
        "module.{}",
        "_orig_mod.{}",
        "module._orig_mod.{}",
        "base_model.model.{}",
        "_fsdp_wrapped_module.{}",
    ],
)
def test_names_of_training_wrappers(wrap: str, tmp_path: Path) -> None:
    stored = {
        wrap.format(name).replace(".mlp.", "._checkpoint_wrapped_module.mlp."): values
        for name, values in arrays(head=True).items()
    }
    want = opened(tmp_path / "a", arrays(head=True), tie_word_embeddings=False)
    got = opened(tmp_path / "b", stored, tie_word_embeddings=False)
    assert got.tensors.keys() == want.tensors.keys() and got.left_out == ()
    for name, tensor in want.tensors.items():
        np.testing.assert_array_equal(got.tensors[name].dequantise(), tensor.dequantise())
    with pytest.raises(FormatError, match=r"are both the model's lm_head\.weight"):
        opened(tmp_path / "b", stored | {HEAD: stored[wrap.format(HEAD)]})


def test_unknown_and_double_tensors(tmp_path: Path) -> None:
    extra = np.zeros(4, np.float16)
    for name in ("score.weight", "model.extra.weight", "model.visual.patch.weight"):
        with pytest.raises(UnsupportedModelError, match=rf"{name} is not a tensor of a llama"):
            opened(tmp_path, arrays() | {name: extra})
    with pytest.raises(FormatError, match=r"are both the model's lm_head\.weight"):
        opened(tmp_path, arrays(head=True) | {"language_model.lm_head.weight": extra})


def test_a_head_next_to_a_tie(tmp_path: Path) -> None:
    stored = arrays(head=True)
    differs = opened(tmp_path, stored, tie_word_embeddings=True)
    assert not differs.spec.tied_embeddings and differs.left_out == ()
    np.testing.assert_array_equal(differs.tensors["head"].dequantise(), stored[HEAD].astype("f4"))
    (note,) = differs.notes
    assert "tie_word_embeddings is true, but lm_head.weight differs" in note

    equal = opened(tmp_path, stored | {HEAD: stored[EMBED]}, tie_word_embeddings=True)
    assert equal.spec.tied_embeddings and "head" not in equal.tensors
    assert equal.left_out == (HEAD,) and equal.notes == ()

    # float32 with the values of float16 is equal, too.
    wide = stored | {HEAD: stored[EMBED].astype(np.float32)}
    assert opened(tmp_path, wide, tie_word_embeddings=True).spec.tied_embeddings


def test_a_tie_with_only_a_head(tmp_path: Path) -> None:
    stored = arrays()
    swapped = {HEAD if name == EMBED else name: values for name, values in stored.items()}
    checkpoint = opened(tmp_path, swapped, tie_word_embeddings=True)
    assert checkpoint.spec.tied_embeddings and checkpoint.notes == ()
    embedding = checkpoint.tensors["embed"].dequantise()
    np.testing.assert_array_equal(embedding, stored[EMBED].astype(np.float32))
    with pytest.raises(FormatError, match=r"embed_tokens\.weight is missing"):
        opened(tmp_path, swapped, tie_word_embeddings=False)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaModel", "llamaforcausallm"])
def test_a_model_without_a_head_only_embeds(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = {name.removeprefix("model."): values for name, values in arrays().items()}
    write(tmp_path, bare, tie_word_embeddings=False, architectures=[architecture])
    caplog.set_level(logging.WARNING)
    with LLM(str(with_tokenizer(tmp_path)), threads=1) as llm:
        assert "the model only computes embeddings" in caplog.text
        assert np.isfinite(llm.embed(["a", "bc"])).all()
        with pytest.raises(RequestError, match=r"no head \(lm_head\.weight\).*call embed"):
            llm.generate("a", SamplingParams(max_tokens=1))


def test_a_model_without_a_head_has_no_probabilities(tmp_path: Path) -> None:
    model = with_tokenizer(write(tmp_path / "model", arrays()))
    bare = with_tokenizer(write(tmp_path / "bare", arrays(), tie_word_embeddings=False))
    with pytest.raises(RequestError, match=r"bare only computes embeddings.*to evaluate"):
        evaluate(str(bare))
    with pytest.raises(RequestError, match=r"draft_model '.*bare' only computes embeddings"):
        LLM(str(model), proposer="draft_model", draft_model=str(bare), threads=1)


@pytest.mark.parametrize("format", ["F32", "BF16", "Q8_0"])
def test_equal_matrices(format: str) -> None:
    a, b = (random_stored(format, 70, 64, seed) for seed in (1, 2))
    again = random_stored(format, 70, 64, 1)
    assert is_equal(a, again) and not is_equal(a, b)
    assert is_equal(a, StoredTensor.from_floats("a", a.dequantise()))
    assert not is_equal(a, random_stored(format, 64, 64, 1))
    last = a.dequantise()
    last[-1, -1] += 1
    assert not is_equal(a, StoredTensor.from_floats("a", last))


def test_a_configuration_without_an_architecture(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"names no architecture .*may be a subfolder"):
        opened(tmp_path, arrays(), architectures=None, model_type=None)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gguf_files_of_text_models(family: str, tmp_path: Path) -> None:
    """Sections of rotary pairs are equal for text."""
    weights = gguf_tensors(len(metadata("llama")["tokenizer.ggml.tokens"]), biases=True)
    norms = {
        f"blk.{i}.attn_{part}_norm.weight": np.ones(16, np.float32) for i in (0, 1) for part in "qk"
    }
    if family == "qwen3":
        weights = {
            name: None if ".bias" in name else value for name, value in weights.items()
        } | norms
    want = open_checkpoint(write_tiny_gguf(tmp_path / "a", None, weights, family))
    sections = {f"{family}vl.rope.dimension_sections": [2, 3, 3, 0]}
    got = open_checkpoint(write_tiny_gguf(tmp_path / "b", sections, weights, f"{family}vl"))
    assert got.spec == want.spec and got.tensors.keys() == want.tensors.keys()
    sections = {f"{family}.rope.dimension_sections": [2, 3, 3, 0]}
    with pytest.raises(UnsupportedModelError, match="dimension_sections"):
        open_checkpoint(write_tiny_gguf(tmp_path / "c", sections, weights, family))


def test_gguf_files_of_other_parts(tmp_path: Path) -> None:
    tower = write_tiny_gguf(tmp_path / "mmproj.gguf", architecture="clip")
    with pytest.raises(UnsupportedModelError, match=r"vision tower .*\(mmproj\); name the GGUF"):
        open_checkpoint(tower)
    embedding = gguf_tensors(len(metadata("llama")["tokenizer.ggml.tokens"]))["token_embd.weight"]
    weights = {"token_embd.weight": None, "output.weight": embedding}
    with pytest.raises(
        FormatError, match=rf"token_embd.* missing; expected shape \[{len(embedding)}"
    ):
        open_checkpoint(write_tiny_gguf(tmp_path / "head.gguf", weights=weights))


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_embedding_models_are_refused(field: dict[str, Any], tmp_path: Path) -> None:
    (name,) = field
    with pytest.raises(UnsupportedModelError, match=rf"{name} = \w+ is not supported"):
        opened(tmp_path, arrays(), architectures=["LlamaModel"], **field)
