"""`tokenizer.json` of four kinds, built and used."""

import base64
import json
import random
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder
from tests.checkpoint.conftest import byte_alphabet
from tests.fuzz.files import scratch, use_tokenizer
from tests.fuzz.mutate import mutate_json

_CHARSMAP = base64.b64encode(b"\4\0\0\0\xff\xff\xff\xffabcd").decode()
_EXTRA: list[Any] = [
    {"type": "Precompiled", "precompiled_charsmap": _CHARSMAP},
    {"type": "Replace", "pattern": {"String": ""}, "content": "aa"},
    {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""},
    {"type": "Split", "pattern": {"Regex": "(a|b|ab)*c"}, "behavior": "Isolated", "invert": False},
    {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False},
    {"type": "WordLevel", "unk_token": "x", "vocab": {"a": 0}},
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0},
    {
        "strategy": {"Fixed": 2**40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    },
    {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
    {"Sequence": {"id": "B", "type_id": 0}},
    {
        "id": 2**32 - 1,
        "content": "<x>",
        "single_word": True,
        "lstrip": True,
        "rstrip": True,
        "normalized": True,
        "special": True,
    },
    "ByteLevel",
    "Metaspace",
    "NFKC",
    "Strip",
    "BertPreTokenizer",
    "Digits",
    "ByteFallback",
    "Fuse",
    "always",
    "MergedWithPrevious",
]


@cache
def valid_inputs() -> list[dict[str, Any]]:
    """Valid tokenizers: byte-level BPE, SentencePiece-style BPE, Unigram, WordPiece."""
    letters = {token: i for i, token in enumerate([*byte_alphabet(), "he", "ll"])}
    spaces = {
        token: i
        for i, token in enumerate(
            [
                "<unk>",
                "<s>",
                "</s>",
                *(f"<0x{b:02X}>" for b in range(256)),
                "▁",
                "a",
                "b",
                "ab",
                "▁a",
            ]
        )
    }
    made = [
        tokenizers.Tokenizer(models.BPE(letters, [("h", "e"), ("l", "l")])),
        tokenizers.Tokenizer(
            models.BPE(
                spaces,
                [("a", "b"), ("▁", "a")],
                unk_token="<unk>",
                fuse_unk=True,
                byte_fallback=True,
            )
        ),
        tokenizers.Tokenizer(
            models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("▁a", -1.5)], 0, False)
        ),
        tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")),
    ]
    made[0].pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(True),
            pre_tokenizers.Split(tokenizers.Regex(r"\s+|\p{L}+"), "isolated"),
            pre_tokenizers.ByteLevel(False),
        ]
    )
    made[0].decoder = decoders.ByteLevel()
    for i in (1, 2, 3):
        made[i].normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made[i].decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    made[1].add_special_tokens(["<unk>", "<s>", "</s>"])
    made[1].post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made[2].pre_tokenizer = pre_tokenizers.Metaspace()
    made[3].pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return [json.loads(tokenizer.to_str()) for tokenizer in made]


def case(rng: random.Random) -> bytes:
    return mutate_json(rng, rng.choice(valid_inputs()), _EXTRA)


def run(case: bytes) -> None:
    (scratch() / "tokenizer.json").write_bytes(case)
    use_tokenizer(tokenizer_from_folder(scratch()))
