"""Token ids of each kind of tokenizer against the makers' own, on nasty texts.

    python -m tests.tokenizer_parity --texts 5000 --qwen QWEN.gguf --minilm FOLDER

| kind | files | reference |
|---|---|---|
| smollm2 | the default model, GGUF | transformers' GPT2Tokenizer, with the published split of digits |
| qwen2 | a GGUF file of Qwen2 or 2.5; without one, its rule over SmolLM2's merges | transformers' Qwen2Tokenizer |
| bpe, bpe-no-prefix, unigram, unigram-plain | vocabularies of 700 tokens in tests/data/tokenizers.json | sentencepiece, if it is installed |
| llama | the vocabulary of `bpe` | transformers' LlamaTokenizer, with control tokens |
| wordpiece | a folder of a BERT model; without one, a vocabulary made here | transformers' BertTokenizer |

transformers' encode each text in four ways: with control tokens read and as text, with and without
added tokens. sentencepiece encodes it as text.

Measured on 2026-11-25 with transformers 5.24, tokenizers 0.23.3 and sentencepiece 0.2.3, on SmolLM2,
Qwen2.5-Coder-0.5B-Instruct and all-MiniLM-L6-v2: of 5,000 texts of each kind, none has other ids.
"""  # noqa: E501 - a table

import argparse
import base64
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from headrace.checkpoint.gguf import Metadata, read_gguf
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checkpoint.tokenizer_gguf import tokenizer_from_gguf
from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder

DATA = Path(__file__).parent / "data"
_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"

_FRAGMENTS = [
    "Hello, world!", "I'm we'LL they\u2019d it'S 'tis y'all'd've", "  ", "   ", "\t", "\n",
    "\r\n", "\n\n\n", " \n ", "\t\t  \n", "0", "12", "1234567", "3.14159e-10", "0xFFFF",
    "1,234,567.89", "\u00bd\u2167\u0663\u0664\u0665\uff15", "na\u00efve caf\u00e9", "cafe\u0301",
    "\u0301", "\u0345\u0301\u0327", "e\u0327\u0301 e\u0301\u0327", "\u212b \u00c5 A\u030a",
    "\ufb01\ufb02\ufb03", "\u1e9e\u00df\u017f", "\u0130I\u0131i", "\u01c5\u01c6",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8", "\u30cf\u309a\u30d1",
    "\ud55c\uad6d\uc5b4", "\u1112\u1161\u11ab", "\u4e2d\u6587\uff0c\u3002\uff01",
    "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e44\u0e17\u0e22",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629\u064e", "\u05e2\u05d1\u05e8\u05d9\u05ea",
    "\u0be7\u0be8\u0be9", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\u200b", "\u200d", "\u2060", "\ufeff", "\u00a0",
    "\u3000", "\u2003", "\u2028", "\u0085", "\x00", "\x01\x1b[0m", "\x7f", "\ufffd", "\ufffe",
    "\ue000", "\U0010ffff", "\U000e0041", "\u202e", "\u00ad",
    "def f(x): return x[0]+=1 # \u00e9", "if(a&&b||!c){a[i++]-=0b101;}",
    "<p class=\"a\">&amp;</p>", "CamelCaseHTTPServer", "snake_case_word", "a/b\\c?d=1&e=%20",
    "----", "====", "!!!???...", "```", "((([[[{{{", "<|", "|>", "<|im_", "<s", "/s>", "[INST]",
    "<<SYS>>", "<0x41>", "<0xFF>", "##ing", "[UNK", "'", "\u2019s", "'S", "\"",
    "\u201cquoted\u201d", "x" * 70, "ha" * 40, "supercalifragilisticexpialidocious",
]  # fmt: skip
_RANGES = [
    (0, 0x7F), (0x80, 0x24F), (0x250, 0x36F), (0x370, 0x5FF), (0x600, 0xDFF), (0xE00, 0x1FFF),
    (0x2000, 0x2BFF), (0x3000, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xFFFF), (0x10000, 0x1FFFF),
    (0x20000, 0x10FFFF),
]  # fmt: skip


def nasty_texts(tokens: list[str], marks: list[str], count: int, seed: int = 0) -> list[str]:
    """Make texts of fragments, random characters, tokens of the vocabulary and control tokens."""
    rng = random.Random(seed)

    def piece() -> str:
        match rng.randrange(8):
            case 0 | 1 | 2:
                return rng.choice(_FRAGMENTS)
            case 3:
                first, last = rng.choice(_RANGES)
                points = [rng.randint(first, last) for _ in range(rng.randint(1, 6))]
                return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
            case 4 | 5:
                return "".join(rng.choice(tokens) for _ in range(rng.randint(1, 5)))
            case 6 if marks:
                return rng.choice(marks)
        return unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKD"]), rng.choice(_FRAGMENTS))

    joints = ["", "", " ", "  ", "\n"]
    return [
        "".join(piece() + rng.choice(joints) for _ in range(rng.randint(1, 9)))
        for _ in range(count)
    ]


class Kind(NamedTuple):
    """A tokenizer with its reference: `expected(text, add_special, parse_special)`."""

    ours: Tokenizer
    expected: Callable[[str, bool, bool], list[int]]
    texts: Callable[[int], list[str]]
    modes: tuple[tuple[bool, bool], ...] = (
        (True, True), (True, False), (False, True), (False, False),
    )  # fmt: skip
    in_any_order: bool = False
    """Whether two splits of equal likelihood count as one."""


def differences(kind: Kind, count: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield texts with different ids, ours and the reference's."""
    for text in kind.texts(count):
        for add_special, parse_special in kind.modes:
            ids = kind.ours.encode(text, add_special, parse_special)
            expected = kind.expected(text, add_special, parse_special)
            if ids != expected and not (kind.in_any_order and sorted(ids) == sorted(expected)):
                yield text, ids, expected


class ChangedMetadata(Metadata):
    """Metadata of a GGUF file, or none, with changed values."""

    def __init__(self, values: dict[str, Any], original: Metadata | None = None) -> None:
        self.where = "values" if original is None else original.where
        self._values = values
        self._original: Any = {} if original is None else original

    def __contains__(self, key: object) -> bool:
        return key in self._values or key in self._original

    def __getitem__(self, key: str) -> Any:
        return self._values[key] if key in self._values else self._original[key]


def _of_transformers(theirs: Any) -> Callable[[str, bool, bool], list[int]]:
    def expected(text: str, add_special: bool, parse_special: bool) -> list[int]:
        ids: list[int] = theirs.encode(
            text, add_special_tokens=add_special, split_special_tokens=not parse_special
        )
        return ids

    return expected


def _byte_level(metadata: Metadata, make: Callable[[dict[str, int], list[Any]], Any]) -> Kind:
    ours = tokenizer_from_gguf(metadata)
    tokens = metadata.strings(f"{_PREFIX}tokens")
    types = metadata.numbers(f"{_PREFIX}token_type").tolist()
    merges = [tuple(merge.split(" ")) for merge in metadata.strings(f"{_PREFIX}merges")]
    theirs = make({token: i for i, token in enumerate(tokens)}, merges)
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    theirs.add_tokens(added)
    marks = [str(token) for token in added]
    words = [ours.token_bytes(i).decode(errors="ignore") for i in range(0, len(tokens), 7)]
    return Kind(ours, _of_transformers(theirs), lambda count: nasty_texts(words, marks, count))


def smollm2() -> Kind:
    from transformers import GPT2Tokenizer

    def make(vocab: dict[str, int], merges: list[Any]) -> Any:
        theirs = GPT2Tokenizer(vocab=vocab, merges=merges)
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
        return theirs

    return _byte_level(read_gguf(resolve("smollm2", progress=False)).metadata, make)


def qwen2(path: str | None = None) -> Kind:
    from transformers import Qwen2Tokenizer

    def make(vocab: dict[str, int], merges: list[Any]) -> Any:
        return Qwen2Tokenizer(vocab=vocab, merges=merges)

    if path:
        return _byte_level(read_gguf(Path(path)).metadata, make)
    metadata = read_gguf(resolve("smollm2", progress=False)).metadata
    return _byte_level(ChangedMetadata({f"{_PREFIX}pre": "qwen2"}, metadata), make)


def _values(name: str) -> dict[str, Any]:
    import numpy as np

    made = json.loads((DATA / "tokenizers.json").read_text())["sentencepiece"][name]["metadata"]
    if charsmap := made.get(f"{_PREFIX}precompiled_charsmap"):
        made[f"{_PREFIX}precompiled_charsmap"] = np.frombuffer(base64.b64decode(charsmap), np.uint8)
    for key in ("scores", "token_type"):
        made[f"{_PREFIX}{key}"] = np.array(made[f"{_PREFIX}{key}"])
    return dict(made)


def _words(values: dict[str, Any]) -> list[str]:
    kinds = zip(values[f"{_PREFIX}tokens"], values[f"{_PREFIX}token_type"], strict=True)
    return [token.replace(_SPACE, " ") for token, kind in kinds if kind == 1]


def sentencepiece(name: str) -> Kind:
    """Texts have no U+2581, which sentencepiece takes for a space in places of its own.

    With a character map, a combining mark does not follow a character that the map may replace: the
    library then drops the mark, as transformers does.
    """
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    values = _values(name)

    def of(key: str, default: Any = None) -> Any:
        return values.get(f"{_PREFIX}{key}", default)

    model = sentencepiece_model_pb2.ModelProto()
    for piece, score, kind in zip(of("tokens"), of("scores"), of("token_type"), strict=True):
        model.pieces.add(piece=piece, score=float(score), type=int(kind))
    model.trainer_spec.model_type = 2 if of("model") == "llama" else 1
    model.trainer_spec.byte_fallback = 6 in of("token_type")
    model.normalizer_spec.add_dummy_prefix = of("add_space_prefix")
    model.normalizer_spec.remove_extra_whitespaces = of("remove_extra_whitespaces", False)
    if (charsmap := of("precompiled_charsmap")) is not None:
        model.normalizer_spec.precompiled_charsmap = charsmap.tobytes()
    reference = SentencePieceProcessor(model_proto=model.SerializeToString())
    words = _words(values)
    added = [t for t, k in zip(of("tokens"), of("token_type"), strict=True) if k == _USER_DEFINED]

    def texts(count: int) -> list[str]:
        made = nasty_texts(words, ["<s>", "</s>"], 2 * count)
        made = [text.replace(_SPACE, " ") for text in made]
        made = [text for text in made if not any(token in text for token in added)]
        if charsmap is not None:
            made = [text for text in made if not _maps_a_base(text)]
        return made[:count]

    return Kind(
        ours=tokenizer_from_gguf(ChangedMetadata(values)),
        expected=lambda text, *_: list(reference.encode(text)),
        texts=texts,
        modes=((False, False),),
        in_any_order=not name.startswith("bpe"),
    )


def _maps_a_base(text: str) -> bool:
    return any(
        unicodedata.category(mark) in ("Mn", "Mc", "Me", "Cf")
        and (
            unicodedata.combining(base) or unicodedata.normalize("NFKC", base + mark) != base + mark
        )
        for base, mark in pairwise(text)
    )


def llama() -> Kind:
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    values = _values("bpe")
    tokens = values[f"{_PREFIX}tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = dict(zip(tokens, values[f"{_PREFIX}scores"].tolist(), strict=True))
    added = [
        token
        for token, kind in zip(tokens, values[f"{_PREFIX}token_type"], strict=True)
        if kind in (2, _CONTROL, _USER_DEFINED)
    ]
    merges = generate_merges(vocab, scores, added)
    theirs = LlamaTokenizer(vocab=vocab, merges=merges)
    own = set(map(str, theirs.all_special_tokens))
    theirs.add_tokens([AddedToken(token, normalized=False) for token in added if token not in own])
    # As in the published tokenizer.json of Llama 2.
    backend = theirs.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    backend.pre_tokenizer = None
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Kind(
        ours=tokenizer_from_gguf(ChangedMetadata(values)),
        expected=_of_transformers(theirs),
        texts=lambda count: nasty_texts(_words(values), ["<s>", "</s>", "<unk>"], count),
    )


def wordpiece(folder: str | None = None) -> Kind:
    from transformers import BertTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
            letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-<>|[]"
            words = [*letters, *(f"##{letter}" for letter in letters), "the", "hello", "##ing"]
            vocab = {token: i for i, token in enumerate([*special, *words])}
            BertTokenizer(vocab=vocab).save_pretrained(scratch)
            folder = scratch
        ours = tokenizer_from_folder(Path(folder))
        theirs = BertTokenizer.from_pretrained(folder)
    words = [ours.token_bytes(i).decode() for i in range(0, ours.vocab_size, 3)]
    marks = ["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"]
    return Kind(ours, _of_transformers(theirs), lambda count: nasty_texts(words, marks, count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=5000, metavar="N", help="texts per kind")
    parser.add_argument("--qwen", metavar="GGUF", help="file of Qwen2 or Qwen2.5")
    parser.add_argument("--minilm", metavar="FOLDER", help="folder of a BERT model")
    args = parser.parse_args()

    makers: dict[str, Callable[[], Kind]] = {
        "smollm2": smollm2,
        "qwen2": lambda: qwen2(args.qwen),
        "llama": llama,
        "wordpiece": lambda: wordpiece(args.minilm),
    }
    for name in ("bpe", "bpe-no-prefix", "unigram", "unigram-plain"):
        makers[name] = lambda name=name: sentencepiece(name)  # type: ignore[misc]
    failed = 0
    for name, make in makers.items():
        try:
            kind = make()
        except ImportError as error:
            print(f"{name}: skipped: {error}")
            continue
        texts = kind.texts(args.texts)
        found = list(differences(kind, args.texts))
        failed += len(found)
        print(f"{name}: {len(texts):,} texts x {len(kind.modes)} ways, {len(found):,} differ")
        for text, ids, expected in found[:5]:
            print(f"  {text!a}\n    {ids}\n    {expected}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
