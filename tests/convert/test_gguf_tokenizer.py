"""A folder's tokenizer is the same one in a GGUF file, or the conversion is refused."""

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from headrace.checkpoint.gguf import Metadata, read_gguf
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.pretokenizers import PRE_TOKENIZERS
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checkpoint.tokenizer_gguf import END_LIST, PHI3_SPACE, tokenizer_from_gguf
from headrace.convert.gguf.header import gguf_file_layout, raw
from headrace.convert.gguf.tokenizer import tokenizer_values
from headrace.errors import FormatError, HeadraceError, UnsupportedModelError
from tests.tiny import tiny_model

DATA = Path(__file__).parents[1] / "data"
CORPUS = (DATA / "nll_text.txt").read_text(encoding="utf-8").splitlines()
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SPEC = replace(tiny_model(0)[0], vocab_size=800)


def read(metadata: dict[str, Any], path: Path) -> Metadata:
    path.write_bytes(
        gguf_file_layout({key: raw(value) for key, value in metadata.items()}, []).header
    )
    return read_gguf(path).metadata


def save(
    folder: Path, backend: tokenizers.Tokenizer | str, vocab_size: int = 800, **config: Any
) -> Checkpoint:
    """Write a folder that has only a tokenizer."""
    text = backend if isinstance(backend, str) else backend.to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Checkpoint(
        path=folder,
        spec=replace(SPEC, vocab_size=vocab_size),
        tensors={},
        chat_template=None,
        tokenizer_source=folder,
    )


def again(checkpoint: Checkpoint) -> tuple[dict[str, Any], Tokenizer]:
    """The key-values, and the tokenizer that is read from them."""
    values = tokenizer_values(checkpoint)
    return values, tokenizer_from_gguf(read(values, checkpoint.path / "made.gguf"))


def assert_same(a: Tokenizer, b: Tokenizer, text: str) -> None:
    for special in (False, True):
        assert a.encode(text, parse_special=special) == b.encode(text, parse_special=special)
    ids = a.encode(text, add_special=False)
    assert ids == b.encode(text, add_special=False)
    assert a.decode(ids) == b.decode(ids)


def byte_level(name: str = "gpt-2", *added: AddedToken) -> tokenizers.Tokenizer:
    """A trained tokenizer with the pre-tokenizer of this name."""
    rule = PRE_TOKENIZERS[name]
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=rule.whole_words))
    backend.pre_tokenizer = _AS_PUBLISHED[name]() if name in _AS_PUBLISHED else rule.build()
    backend.decoder = decoders.ByteLevel()
    if rule.composes:
        backend.normalizer = normalizers.NFC()
    special = ["<|begin|>", "<|end|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(list(added))
    return backend


_AS_PUBLISHED: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The `tokenizer.json` of a vocabulary that SentencePiece trained."""
    found = json.loads((DATA / "sentencepiece.json").read_text())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": found["tokens"],
        "tokenizer.ggml.scores": np.array(found["scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(found["types"], np.int32),
    }
    made = tokenizer_from_gguf(read(metadata, tmp_path_factory.mktemp("made") / "made.gguf"))
    state: dict[str, Any] = json.loads(made.to_json())
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folder")


def test_disk_errors(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, byte_level())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(HeadraceError, match=r"a temporary file in .*: File too large"):
            again(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestByteLevel:
    @pytest.mark.parametrize(
        "name",
        [
            "gpt-2",
            "smollm",
            "llama-bpe",
            "qwen2",
            "stablelm2",
            "tekken",
            "gpt-4o",
            "deepseek-v3",
            "default",
        ],
    )
    def test_pre_tokenizer_names(self, name: str, tmp_path: Path) -> None:
        checkpoint = save(tmp_path, byte_level(name), bos_token="<|begin|>", eos_token="<|end|>")
        ours, (values, found) = checkpoint.load_tokenizer(), again(checkpoint)
        named, rule = PRE_TOKENIZERS[values["tokenizer.ggml.pre"]], PRE_TOKENIZERS[name]
        assert (named.expressions, named.whole_words, named.composes) == (
            rule.expressions,
            rule.whole_words,
            rule.composes,
        )
        assert (
            (found.bos_id, found.eos_id, found.eos_ids)
            == (0, 1, {1, 2})
            == (ours.bos_id, ours.eos_id, ours.eos_ids)
        )
        for line in CORPUS[:40]:
            assert_same(ours, found, line)

    @given(text=ANY_TEXT, name=st.sampled_from(["gpt-2", "llama-bpe", "qwen2"]))
    @settings(deadline=None)  # the first of each name trains
    def test_any_text(self, folder: Path, text: str, name: str) -> None:
        place = folder / name
        if not place.exists():
            place.mkdir()
            checkpoint = save(place, byte_level(name))
            _TOKENIZERS[name] = checkpoint.load_tokenizer(), again(checkpoint)[1]
        assert_same(*_TOKENIZERS[name], text)

    @given(
        flags=st.fixed_dictionaries(
            {
                name: st.booleans()
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
        ),
        text=st.lists(st.sampled_from(["<x>", " ", "a", "\n", "<|end|>", "é"]), max_size=8).map(
            "".join
        ),
    )
    @settings(max_examples=40, deadline=None)
    def test_tokens_with_flags_are_the_same_or_refused(
        self, folder: Path, flags: dict[str, bool], text: str
    ) -> None:
        checkpoint = save(folder, byte_level("qwen2", AddedToken("<x>", **flags)))
        try:
            found = again(checkpoint)[1]
        except UnsupportedModelError:
            assert flags["single_word"] or flags["lstrip"] or flags["rstrip"] or flags["normalized"]
        else:
            assert_same(checkpoint.load_tokenizer(), found, text)

    def test_types_of_tokens(self, tmp_path: Path) -> None:
        backend = byte_level("gpt-2", AddedToken("<tool>", normalized=False))
        count = backend.get_vocab_size()
        values, found = again(save(tmp_path, backend, count + 3, pad_token={"content": "<|end|>"}))
        types, tokens = (
            values["tokenizer.ggml.token_type"].tolist(),
            values["tokenizer.ggml.tokens"],
        )
        assert types == [3, 3, 3, *[1] * (count - 4), 4, 5, 5, 5]
        assert tokens[-4:] == ["<tool>", *(f"[PAD{i}]" for i in range(count, count + 3))]
        assert values["tokenizer.ggml.padding_token_id"] == 1
        assert (
            not {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.unknown_token_id"} & values.keys()
        )
        assert found.encode("<tool>") == [count - 1]

    @pytest.mark.parametrize(
        "template", ["$A", "<|begin|> $A", "$A <|end|>", "<|begin|> $A <|end|>"]
    )
    def test_bos_and_eos_around_a_text(self, template: str, tmp_path: Path) -> None:
        backend = byte_level()
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
        )
        checkpoint = save(tmp_path, backend, bos_token="<|begin|>", eos_token="<|end|>")
        values, found = again(checkpoint)
        assert values["tokenizer.ggml.add_bos_token"] == ("begin" in template)
        assert values["tokenizer.ggml.add_eos_token"] == ("end" in template)
        assert_same(checkpoint.load_tokenizer(), found, "Hi there")

    def test_end_of_generation_tokens(self, tmp_path: Path) -> None:
        checkpoint = save(tmp_path, byte_level(), eos_token="<|end|>")
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5, 7]}))
        values, found = again(checkpoint)
        assert found.eos_ids == checkpoint.load_tokenizer().eos_ids == {1, 5, 7}
        keys = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        assert tuple(values[key] for key in keys) == (5, 7)

        # More ends than llama.cpp has keys for.
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5, 7, 9]}))
        values, found = again(checkpoint)
        assert found.eos_ids == {1, 5, 7, 9}
        assert values[END_LIST].tolist() == [1, 5, 7, 9]

    def test_chat_templates(self, tmp_path: Path) -> None:
        checkpoint = replace(
            save(tmp_path, byte_level()), chat_template="{{ a }}", tool_template="{{ b }}"
        )
        metadata = read(tokenizer_values(checkpoint), tmp_path / "made.gguf")
        assert metadata["tokenizer.chat_template"] == "{{ a }}"
        assert metadata["tokenizer.chat_template.tool_use"] == "{{ b }}"


_TOKENIZERS: dict[str, tuple[Tokenizer, Tokenizer]] = {}


class TestSentencePiece:
    def test_the_same_ids(self, sentencepiece: dict[str, Any], tmp_path: Path) -> None:
        checkpoint = save(
            tmp_path, json.dumps(sentencepiece), 704, bos_token="<s>", eos_token="</s>"
        )
        ours, (values, found) = checkpoint.load_tokenizer(), again(checkpoint)
        original = json.loads((DATA / "sentencepiece.json").read_text())
        types = values["tokenizer.ggml.token_type"].tolist()
        assert values["tokenizer.ggml.tokens"][:700] == original["tokens"]
        assert types[:2] == [2, 3] and types[4:260] == [6] * 256 and types[700:] == [5] * 4
        for line in CORPUS[:40]:
            assert_same(ours, found, line)

    @given(text=ANY_TEXT)
    @settings(deadline=None)
    def test_any_text(self, sentencepiece: dict[str, Any], folder: Path, text: str) -> None:
        if "spm" not in _TOKENIZERS:
            checkpoint = save(folder, json.dumps(sentencepiece), bos_token="<s>", eos_token="</s>")
            _TOKENIZERS["spm"] = checkpoint.load_tokenizer(), again(checkpoint)[1]
        assert_same(*_TOKENIZERS["spm"], text)

    def test_without_a_space_before_the_text(
        self, sentencepiece: dict[str, Any], tmp_path: Path
    ) -> None:
        decoder = {"type": "Sequence", "decoders": sentencepiece["decoder"]["decoders"][:3]}
        state = sentencepiece | {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "decoder": decoder,
        }
        checkpoint = save(tmp_path, json.dumps(state), bos_token="<s>", eos_token="</s>")
        values, found = again(checkpoint)
        assert values["tokenizer.ggml.add_space_prefix"] is False
        assert_same(checkpoint.load_tokenizer(), found, "Hello  there")

    @pytest.mark.parametrize("name", ["Phi-3 mini", "tiny"])
    @pytest.mark.parametrize("takes_space", [True, False])
    def test_white_space_after_control_tokens(
        self, sentencepiece: dict[str, Any], tmp_path: Path, name: str, takes_space: bool
    ) -> None:
        """Phi-3 has it, and llama.cpp knows that by name. Otherwise the file says it."""
        added = [
            token | {"rstrip": takes_space and token["content"] not in ("<s>", "<unk>")}
            for token in sentencepiece["added_tokens"]
        ]
        state = json.dumps(sentencepiece | {"added_tokens": added})
        checkpoint = save(tmp_path, state, bos_token="<s>", eos_token="</s>")
        checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, name=name))
        values = tokenizer_values(checkpoint)
        is_as_named = takes_space == (name == "Phi-3 mini")
        assert values.get(PHI3_SPACE) == (None if is_as_named else takes_space)
        metadata = read(values | {"general.name": name}, tmp_path / "made.gguf")
        found, ours = tokenizer_from_gguf(metadata), checkpoint.load_tokenizer()
        assert_same(ours, found, "a</s>  \nb<s> c")
        assert (ours.encode("</s> b") == ours.encode("</s>b")) == takes_space

    def test_without_bos(self, sentencepiece: dict[str, Any], tmp_path: Path) -> None:
        """llama.cpp defaults to token 1."""
        checkpoint = save(
            tmp_path, json.dumps(sentencepiece | {"post_processor": None}), eos_token="</s>"
        )
        with pytest.raises(UnsupportedModelError, match="bos_id would be 1 instead of None"):
            tokenizer_values(checkpoint)

    def test_space_before_the_first_text_only(
        self, sentencepiece: dict[str, Any], tmp_path: Path
    ) -> None:
        """llama.cpp also adds one after every special token."""
        space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        state = sentencepiece | {"normalizer": None, "pre_tokenizer": space}
        with pytest.raises(
            UnsupportedModelError, match=r"'.*' would become other tokens.*convert_hf_to_gguf"
        ):
            tokenizer_values(save(tmp_path, json.dumps(state), bos_token="<s>", eos_token="</s>"))


class TestRefused:
    def test_more_tokens_than_rows(self, tmp_path: Path) -> None:
        with pytest.raises(
            UnsupportedModelError, match="a token 499, but the embedding has 400 rows"
        ):
            tokenizer_values(save(tmp_path, byte_level(), 400))

    @pytest.mark.parametrize(
        "change",
        [
            {"pre_tokenizer": pre_tokenizers.Split(Regex(r"\w+"), "isolated")},
            {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
            {"normalizer": normalizers.NFKC()},
            {"normalizer": normalizers.NFC()},
        ],
    )
    def test_pre_tokenizers_without_a_name(self, change: dict[str, Any], tmp_path: Path) -> None:
        backend = byte_level()
        for part, value in change.items():
            setattr(backend, part, value)
        with pytest.raises(
            UnsupportedModelError,
            match="its pre-tokenizer with its normalizer matches no known rule",
        ):
            tokenizer_values(save(tmp_path, backend))

    def test_other_tokens_around_a_text(self, tmp_path: Path) -> None:
        backend = byte_level()
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_end|> $A", special_tokens=[("<|im_end|>", 2)]
        )
        with pytest.raises(UnsupportedModelError, match="surrounds a text with tokens other"):
            tokenizer_values(save(tmp_path, backend, bos_token="<|begin|>"))

    def test_other_models(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer(
            models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0)], 0, False)
        )
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        with pytest.raises(UnsupportedModelError, match="its model is Unigram"):
            tokenizer_values(save(tmp_path, backend))

    def test_a_token_that_is_called_like_padding(self, tmp_path: Path) -> None:
        values, _ = again(save(tmp_path, byte_level("gpt-2", AddedToken("[PAD600]"))))
        assert values["tokenizer.ggml.tokens"].count("[PAD600]") == 2

    def test_damaged(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            tokenizer_values(save(tmp_path, "{}"))
