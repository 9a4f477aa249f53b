"""Tokenizers of GGUF files and folders against the originals' ids in
tests/data/tokenizers.json.
"""

# ruff: noqa: RUF001 - letters that look like others are what it is about

import base64
import json
import unicodedata
import zlib
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.pretokenizers import PRE_TOKENIZERS
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder
from headrace.errors import UnsupportedModelError
from tests.checkpoint.conftest import DATA, SHAPE, byte_alphabet

# scripts, combining marks, emoji that are joined, runs of spaces and digits, line ends, code,
# control tokens spelt out, odd ones
TEXTS = [
    "Hello, world! It's o'clock: I'm, we'LL, they'D, you'Re — isn't it? 'Tis 'twas.",
    "  two  spaces   three    four \t tab\t\ttabs   ",
    "line\nbreak\n\nparagraph\r\nCRLF\r\n\r\n   \n  indented\n\t\tcode\n\n\n   end \n",
    "0 12 123 1234 12345 1234567890 3.14159 1e-9 0xFF 1,234,567.89 ½ ¾ Ⅷ ٣٤٥ १२३ ５６７ x2y3z10",
    "naïve café — “quoted” ‘single’ … ÉCOLE Straße ŒUVRE İstanbul ǅ ǆ ß ſ",
    "Ελληνικά Русский язык Ёлка українська Հայերեն ქართული",
    "日本語のテキスト、カタカナ、漢字。한국어 문장입니다! 中文：你好，世界（标点）。「引用」",
    "हिन्दी में पाठ। ไทยภาษา العربية نص، عربى؟ עברית বাংলা தமிழ் አማርኛ",
    "e\u0301 a\u0308o\u0308 n\u0303 Å\u030a \u0301lone "
"Z\u0351\u0343\u034aa\u0334l\u0323g\u0324o\u0331",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇯🇵 ❤️ 🎉🎉🎉 ©®™ ↔→ ∑∫√ 𝒳𝔸",
    "def f(x: int) -> str:\n    return f\"{x!r}\" + '\\n' if x != 0 else None  # "
"comment\n\n\n\tif (a&&b||!c) { a[i++] -= 0b101; }\n",
    "<html><p class=\"a-b\">&amp; CamelCaseWord snake_case_word kebab-case $var @user "
"#tag a/b\\c ~/x.y?z=1&w=%20</p>",
    "<|im_start|>user\n<|im_end|> <s> </s> [INST] <unk> <|endoftext|> <turn>",
    "a\u00a0b\u2003c\u3000d\u200be\u200df\ufeffg\u2028h\u0085i\x00j\x7fk\x1bl \ufffd \ue000",
    "----====____ ***** !!!??? ... ,,, ((([[[{{{ }}}]]]))) ``` ~~~ ^^^ |||  +++ <<< >>> $$$",
    "supercalifragilisticexpialidocious " + "ha" * 30 + " " + "x" * 70 + " " + "=" * 40 + " " * 40 + "!",  # noqa: E501
    "", " ", "\n", "   ", "a", "\u2581", " \u2581\u2581 a\u2581b", "'", " '", "1", " 1", "\t",
    "\r", "\r\n", "é", "\U0010ffff",
]  # fmt: skip


WITHOUT_ADDED = [text.replace(" <turn>", "") for text in TEXTS]
"""Texts without added tokens: transformers and llama.cpp put a space after these."""


@cache
def originals() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / "tokenizers.json").read_text())
    return data


def checksum(ids: list[int]) -> int:
    return zlib.crc32(array("i", ids).tobytes())


def tokenizer_of(write_gguf: Any, metadata: dict[str, Any], size: int) -> Tokenizer:
    weights = {"token_embd.weight": np.zeros((size, SHAPE["dim"]), np.float32)}
    return open_checkpoint(write_gguf(metadata, weights)).load_tokenizer()


@pytest.mark.parametrize("name", originals()["pre"])
def test_byte_level(name: str, write_gguf: Any) -> None:
    """Merges cross all splits of a rule, so that ids show each split."""
    parts = originals()["byte_level"]
    tokens = byte_alphabet() + parts["tokens"]
    of_words = {
        "pre": name,
        "tokens": tokens,
        "token_type": [1] * len(tokens),
        "merges": parts["merges"],
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in of_words.items()}
    tokenizer = tokenizer_of(write_gguf, metadata, len(tokens))
    for text, expected in zip(TEXTS, originals()["pre"][name], strict=True):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert checksum(ids) == expected, ascii(text)
        assert tokenizer.decode(ids) == (
            unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].composes else text
        )


def test_every_rule_has_a_reference() -> None:
    judged = [PRE_TOKENIZERS[name].expressions for name in originals()["pre"]]
    assert {
        name for name, rule in PRE_TOKENIZERS.items() if rule.expressions not in judged
    } == set()


@pytest.mark.parametrize("name", originals()["sentencepiece"])
def test_sentencepiece(name: str, write_gguf: Any) -> None:
    """Unigram tokens are compared in any order: rounding decides between equal
    likelihoods.
    """
    made = originals()["sentencepiece"][name]
    metadata = made["metadata"] | {"tokenizer.ggml.merges": None, "tokenizer.ggml.pre": None}
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        metadata["tokenizer.ggml.precompiled_charsmap"] = base64.b64decode(charsmap)
    tokenizer = tokenizer_of(write_gguf, metadata, len(metadata["tokenizer.ggml.tokens"]))
    for text, expected, decoded in zip(WITHOUT_ADDED, made["ids"], made["decoded"], strict=True):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert checksum(ids if name.startswith("bpe") else sorted(ids)) == expected, ascii(text)
        if "\u2581" not in text:  # which stands for a space, that one strips and another does not
            assert zlib.crc32(tokenizer.decode(ids, skip_special=False).encode()) == decoded, ascii(
                text
            )
    ids = tokenizer.encode("a")
    assert (ids[0] == 1, ids[-1] == 2) == (
        (True, False) if metadata["tokenizer.ggml.model"] == "llama" else (False, True)
    )


def test_unigram_of_a_folder(tmp_path: Path) -> None:
    """A folder that transformers writes from a vocabulary of sentencepiece."""
    made = originals()["sentencepiece"]["unigram"]
    of = {key.rpartition(".")[2]: value for key, value in made["metadata"].items()}
    backend = tokenizers.Tokenizer(
        models.Unigram(list(zip(of["tokens"], of["scores"], strict=True)), 0, byte_fallback=True)
    )
    spaces = [
        normalizers.Replace(Regex(pattern), by)
        for pattern, by in ((r"\A +", ""), (" {2,}", " "), (r" +\z", ""))
    ]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(base64.b64decode(of["precompiled_charsmap"])), *spaces]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always", split=False)]
    )
    backend.add_tokens(
        [token for token, kind in zip(of["tokens"], of["token_type"], strict=True) if kind == 4]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path)
    for text, expected in zip(WITHOUT_ADDED, made["ids"], strict=True):
        # A Metaspace takes U+2581 for a space, and the library's model finds </s>.
        if "\u2581" not in text and "</s>" not in text:
            ids = tokenizer.encode(text, add_special=False, parse_special=False)
            assert checksum(sorted(ids)) == expected, ascii(text)


def test_a_control_token_that_a_unigram_model_would_find(write_gguf: Any) -> None:
    values = {
        "model": "t5",
        "tokens": ["<unk>", "</s>", "a", "<", "/"],
        "scores": [0.0, 0.0, -1.0, -2.0, -3.0],
        "token_type": [2, 3, 1, 1, 1],
    }
    of = {f"tokenizer.ggml.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": None,
    }
    with pytest.raises(UnsupportedModelError, match="'<unk>' cannot be spelt in other tokens"):
        tokenizer_of(write_gguf, of, 5)
