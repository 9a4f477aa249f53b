"""GGUF files of Hugging Face folders: the same model is read from them, or the
conversion is refused.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.convert.folder.writer import plan_folder, write_folder
from headrace.convert.gguf.mixtures import MIXTURES
from headrace.convert.gguf.writer import gguf_contents, plan_gguf
from headrace.convert.source_model import open_source_model
from headrace.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from headrace.quant.formats import StoredTensor
from tests.convert.conversion import to_gguf
from tests.families import SIZE, VARIANTS, YARN, config_of, save_model
from tests.llama_cpp.fixtures import KEPT, unpack
from tests.llama_cpp.judge import differences
from tests.llama_cpp.models import CASES, REFUSED, save_coarse, save_tokenizer

MODELS: dict[str, Callable[[Path], Any]] = {
    **{name: lambda folder, name=name: save_model(name, folder) for name in VARIANTS},
    # As llama.cpp can run them, which is not how they are above.
    **{
        f"{name} changed": lambda folder, name=name: save_coarse(name, folder)
        for name, case in CASES.items()
        if case.options or case.mxfp4
    },
}
UNEVEN = {
    name: "rope would not have the frequencies of the rule yarn"
    for name in ("deepseek-v2", "deepseek-v3")
}
"""Models whose `mscale` differs from `mscale_all_dim`, which has no key."""
LEFT_OUT: dict[str, Any] = {
    "attention.head_count_kv": None,
    "attention.sliding_window": 0,
    "rope.scaling.type": "none",
    "tensor_data_layout": "jploski",
}
"""Keys of llama.cpp's converter that only repeat defaults."""


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_same_or_refused(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    if message := (REFUSED | UNEVEN).get(name):
        with pytest.raises(UnsupportedModelError, match=message):
            to_gguf(tmp_path / "model", tmp_path / "made.gguf")
        assert not list(tmp_path.glob("*.gguf"))
        return
    to_gguf(tmp_path / "model", tmp_path / "made.gguf")
    assert differences(tmp_path / "model", tmp_path / "made.gguf") == []
    folder, file = (open_checkpoint(tmp_path / place).spec for place in ("model", "made.gguf"))
    assert folder.max_context == file.max_context
    assert [
        row.format.name
        for row in read_gguf(tmp_path / "made.gguf").tensors.values()
        if row.format.name != "F32"
    ] == []


def is_near(found: Any, value: Any) -> bool:
    return (
        bool(np.isclose(found, value, 1e-6, 0))
        if isinstance(value, float)
        else bool(found == value)
    )


@pytest.mark.parametrize("name", KEPT)
def test_keys_and_tensors_as_llama_cpp_converts_them(name: str, tmp_path: Path) -> None:
    """All keys of llama.cpp's converter are written with equal values, except LEFT_OUT."""
    save_coarse(name, tmp_path / "model")
    ours, theirs = (
        gguf_contents(open_source_model(tmp_path / "model")),
        read_gguf(unpack(name, tmp_path)),
    )
    prefix = theirs.metadata.string("general.architecture") + "."
    assert ours.fields["general.architecture"] == prefix[:-1]
    values = {
        key.removeprefix(prefix): value
        for key, value in theirs.metadata.items()
        if key.startswith(prefix)
    }
    dim, heads = values["embedding_length"], values["attention.head_count"]
    implied = LEFT_OUT | {
        "attention.key_length": dim // heads,
        "attention.value_length": dim // heads,
        # Its converter repeats `norm_eps` of models without an RMS norm under this key.
        "attention.layer_norm_rms_epsilon": values.get("attention.layer_norm_epsilon"),
    }
    for key, value in values.items():
        if key == "context_length" and prefix in ("falcon.", "bloom."):
            continue  # they take what such models were first published with
        found = ours.fields.get(prefix + key)
        assert is_near(found, value) if found is not None else value == implied.get(key), key
    assert dict(ours.shapes) == {tensor: stored.shape for tensor, stored in theirs.tensors.items()}


@pytest.mark.parametrize(
    ("name", "mixture"),
    [("qwen3-moe", "Q8_0"), ("llama3-gqa", "Q4_K_M"), ("phi3-longrope", "F16"), ("gpt2", "Q5_0")],
)
def test_folders_and_gguf_files_get_the_same_mixtures(
    name: str, mixture: str, tmp_path: Path
) -> None:
    """Conversion by way of a float32 file gives the same file."""
    save_model(name, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    straight = read_gguf(to_gguf(tmp_path / "model", tmp_path / "straight.gguf", mixture))
    whole = read_gguf(
        to_gguf(
            to_gguf(tmp_path / "model", tmp_path / "float.gguf"), tmp_path / "again.gguf", mixture
        )
    )
    assert straight.metadata["general.file_type"] == MIXTURES[mixture].file_type
    assert {key: straight.metadata.raw(key) for key in straight.metadata} == {
        key: whole.metadata.raw(key) for key in whole.metadata
    }
    assert (
        any(tensor.format.name not in ("F32", "F16") for tensor in straight.tensors.values())
        or mixture == "F16"
    )
    assert straight.tensors.keys() == whole.tensors.keys()
    for tensor, stored in straight.tensors.items():
        other = whole.tensors[tensor]
        assert (stored.format, stored.shape) == (other.format, other.shape)
        np.testing.assert_array_equal(stored.parts["codes"], other.parts["codes"])


def changed(folder: Path, **options: Any) -> Path:
    """A Llama with other fields in its configuration."""
    save_model("llama2-mha", folder)
    save_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text()) | options
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "rope_parameters"})
    )
    return folder


@pytest.mark.parametrize(
    ("scaling", "keys"),
    [
        ({"attention_factor": 0.9}, {"attn_factor": 0.9 / (0.1 * np.log(4) + 1)}),
        ({"beta_fast": 16, "beta_slow": 2}, {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}),
        (
            {"mscale": 0.5, "mscale_all_dim": 1.5},
            {
                "attn_factor": (0.05 * np.log(4) + 1)
                / (0.15 * np.log(4) + 1)
                / (0.1 * np.log(4) + 1)
            },
        ),
    ],
)
def test_yarn(scaling: Mapping[str, Any], keys: Mapping[str, float], tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", rope_scaling=YARN | scaling, rope_theta=1e4)
    metadata = read_gguf(to_gguf(folder, tmp_path / "made.gguf")).metadata
    always = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    prefix = "llama.rope.scaling."
    found = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    assert found == {
        key: value if isinstance(value, str) else pytest.approx(value)
        for key, value in (always | keys).items()
    }
    assert differences(folder, tmp_path / "made.gguf") == []


def test_yarn_whose_limits_are_not_rounded(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", rope_scaling=YARN | {"truncate": False}, rope_theta=1e4)
    with pytest.raises(
        UnsupportedModelError, match=r"of the rule yarn\); try llama\.cpp's convert_hf_to_gguf\.py"
    ):
        plan_gguf(open_source_model(folder), "F16")


def test_fields_without_a_gguf_key(tmp_path: Path) -> None:
    config = config_of("gemma2", query_pre_attn_scalar=17).to_dict()
    save_model("gemma2", tmp_path / "gemma")
    (tmp_path / "gemma/config.json").write_text(
        json.dumps(config | {"architectures": ["Gemma2ForCausalLM"]})
    )
    with pytest.raises(
        UnsupportedModelError, match=r"attention_scale would be 0\.17\d* instead of 0\.24"
    ):
        plan_gguf(open_source_model(tmp_path / "gemma"), "F16")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    save_model("llama2-mha", tmp_path / "model")
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        to_gguf(tmp_path / "model", tmp_path / "made.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_chat_templates_that_are_not_unicode(tmp_path: Path) -> None:
    save_model("llama2-mha", tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "model/tokenizer_config.json").write_text(
        '{"chat_template": "\\ud800", "pad_token": {"content": []}}'
    )
    with pytest.raises(FormatError, match=r"tokenizer\.chat_template is not valid Unicode"):
        to_gguf(tmp_path / "model", tmp_path / "made.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    save_model("llama2-mha", tmp_path / "model")
    vocab = {"a": 0, "b": SIZE["vocab_size"]}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.save(str(tmp_path / "model/tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="a token 101, but the embedding has 101 rows"):
        to_gguf(tmp_path / "model", tmp_path / "made.gguf")


def test_the_default_model_comes_back_from_a_folder(tmp_path: Path) -> None:
    source = resolve("smollm2", progress=False)
    original = open_source_model(source)
    write_folder(
        original,
        tmp_path / "folder",
        plan_folder(original, None, (), "BF16"),
        original.checkpoint.tensors,
        (),
    )
    to_gguf(tmp_path / "folder", tmp_path / "made.gguf", "BF16")
    before, after = read_gguf(source).metadata, read_gguf(tmp_path / "made.gguf").metadata
    for key in (
        "model",
        "pre",
        "tokens",
        "token_type",
        "merges",
        "bos_token_id",
        "eos_token_id",
        "add_bos_token",
        "add_space_prefix",
    ):
        assert np.array_equal(before[f"tokenizer.ggml.{key}"], after[f"tokenizer.ggml.{key}"]), key
    assert before["tokenizer.chat_template"] == after["tokenizer.chat_template"]
    made = open_checkpoint(tmp_path / "made.gguf")
    assert {
        name: value
        for name, value in vars(made.spec).items()
        if value != getattr(original.checkpoint.spec, name)
    } == {"name": "folder"}
    text = (Path(__file__).parents[1] / "data/nll_text.txt").read_text()
    assert made.load_tokenizer().encode(text) == original.checkpoint.load_tokenizer().encode(text)
    tensors: Mapping[str, StoredTensor] = open_checkpoint(tmp_path / "folder").tensors
    assert {tensor.format.name for tensor in made.tensors.values()} == {"BF16", "F32"}
    assert all(
        np.array_equal(tensor.dequantise(), tensors[name].dequantise())
        for name, tensor in made.tensors.items()
    )
