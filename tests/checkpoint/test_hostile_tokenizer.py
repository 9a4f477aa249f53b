"""Harmful tokenizer files in valid JSON: each ends in an error of ours, even if the
library panics, and encoding is deterministic.
"""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.tokenizer import Tokenizer, library_calls
from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder
from headrace.errors import ClosedError, FormatError, RequestError

BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3},
    "merges": ["a b", "ab a"],
}
UNIGRAM = {
    "type": "Unigram",
    "unk_id": None,
    "vocab": [["a", -1.0], ["b", -1.5], ["ab", -2.0]],
    "byte_fallback": False,
}
WORD_PIECE = {
    "type": "WordPiece",
    "unk_token": "x",
    "vocab": {"a": 0},
    "max_input_chars_per_word": 9,
    "continuing_subword_prefix": "",
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}
OUT_OF_BOUNDS = base64.b64encode(b"\4\0\0\0\xff\xff\xff\xffabcd").decode()
NO_SUCH_TOKEN = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}


def tokenizer(folder: Path, **parts: Any) -> Tokenizer:
    made = {"version": "1.0", "added_tokens": [], "decoder": BYTE_LEVEL, "model": BPE} | parts
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
    (folder / "tokenizer.json").write_text(json.dumps(dict.fromkeys(names) | made))
    return tokenizer_from_folder(folder)


def split_at(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


class TestPanics:
    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            (
                {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
                "Cannot parse precompiled_charsmap",
            ),
            ({"post_processor": NO_SUCH_TOKEN}, "no entry found for key"),
            ({"model": BPE | {"merges": ["a zzz"]}}, "zzz"),
            ({"model": UNIGRAM | {"unk_id": 7}}, "UnkIdNotInVocabulary"),
            ({"pre_tokenizer": split_at("(")}, "Tokenizer from buffer"),
        ],
    )
    def test_at_load(self, tmp_path: Path, parts: dict[str, Any], message: str) -> None:
        tokenizer(tmp_path)
        with pytest.raises(FormatError, match=rf"^tokenizer\.json: .*{message}"):
            tokenizer(tmp_path, **parts)

    @pytest.mark.parametrize(
        ("parts", "text"),
        [
            ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": OUT_OF_BOUNDS}}, "ab"),
            ({"pre_tokenizer": split_at("(a|aa)+$")}, "a" * 40 + "b"),
            ({"model": UNIGRAM}, "abc"),
            ({"model": {"type": "WordLevel", "unk_token": "x", "vocab": {"a": 0}}}, "b"),
            ({"model": WORD_PIECE}, "b"),
        ],
    )
    def test_at_a_text(self, tmp_path: Path, parts: dict[str, Any], text: str) -> None:
        made = tokenizer(tmp_path, **parts)
        for special in (True, False):
            with pytest.raises(
                RequestError, match=r"^the tokenizer cannot encode this text: ."
            ) as error:
                made.encode(text, parse_special=special)
            assert "\n" not in str(error.value) and len(str(error.value)) < 400

    def test_what_goes_through(self) -> None:
        class OverdueError(Exception):
            """An error that a signal handler may raise."""

        for error in (
            ClosedError("ours"),
            MemoryError(),
            KeyboardInterrupt(),
            SystemExit(),
            InterruptedError(),
            OverdueError(),
        ):
            with pytest.raises(type(error)), library_calls("x"):
                raise error


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def in_turn(kind: str, part: dict[str, Any], times: int) -> dict[str, Any]:
    return {"type": "Sequence", kind: [part] * times}


def template(single: list[dict[str, Any]], ids: int = 1) -> dict[str, Any]:
    special = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}}
    return NO_SUCH_TOKEN | {"single": single, "special_tokens": special}


TEXT: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL: dict[str, Any] = {"SpecialToken": {"id": "x", "type_id": 0}}


class TestGrowth:
    """Tokenizers that multiply texts are refused before a text is encoded, as the
    library would end the process.
    """

    @pytest.mark.parametrize(
        "parts",
        [
            {"normalizer": in_turn("normalizers", replace({"String": "a"}, "aa"), 40)},
            {"normalizer": in_turn("normalizers", replace({"Regex": ""}, "a"), 40)},
            {"normalizer": replace({"String": ""}, "a" * 10**7)},
            {"normalizer": {"type": "Prepend", "prepend": "a" * 10**7}},
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(8) + b"a" * 10**6).decode()}},  # noqa: E501
            {"post_processor": template([TEXT] * 10**5)},
            {"post_processor": in_turn("processors", template([TEXT, TEXT]), 40)},
            {"post_processor": template([TEXT, *[SPECIAL] * 10**4], ids=10**4)},
        ],
    )  # fmt: skip
    def test_refused(self, tmp_path: Path, parts: dict[str, Any]) -> None:
        with pytest.raises(
            FormatError,
            match=r"tokenizer\.json: the tokenizer makes texts up to [\d,]+ times as long, more "
            r"than the limit of 256",
        ):
            tokenizer(tmp_path, **parts)

    @pytest.mark.parametrize(
        "parts",
        [
            {"normalizer": in_turn("normalizers", replace({"Regex": " {2,}"}, "▁"), 8)},
            {"normalizer": in_turn("normalizers", replace({"String": "``"}, '"'), 99)},
            {
                "normalizer": {"type": "Prepend", "prepend": "▁"},
                "post_processor": template([SPECIAL, TEXT, SPECIAL]),
            },
        ],
    )
    def test_real_ones_are_not(self, tmp_path: Path, parts: dict[str, Any]) -> None:
        tokenizer(tmp_path, **parts).encode("ab")


class TestOneTextOneEncoding:
    def test_dropout_is_off(self, tmp_path: Path) -> None:
        text = "abababaabab" * 3
        dropping, plain = (
            tokenizer(tmp_path, model=BPE | {"dropout": dropout}) for dropout in (0.5, None)
        )
        for parse in (True, False):
            assert {tuple(dropping.encode(text, parse_special=parse)) for _ in range(16)} == {
                tuple(plain.encode(text))
            }
