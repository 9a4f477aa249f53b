"""The tokenizer of a folder as GGUF key-values, compared with the original."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.end_tokens import end_names
from headrace.checkpoint.files import find, read_json
from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.pretokenizers import PRE_TOKENIZERS
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checkpoint.tokenizer_gguf import (
    END_LIST,
    PHI3_SPACE,
    has_phi3_space,
    tokenizer_from_gguf,
)
from headrace.convert.gguf.header import gguf_file_layout, raw
from headrace.convert.source_model import gguf_layout
from headrace.errors import HeadraceError, UnsupportedModelError
from headrace.quant.arrays import Floats

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_PREFIX = "tokenizer.ggml."
_GPT2 = PRE_TOKENIZERS["gpt-2"].expressions
_TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces ",
    "line\n\n\nbreaks\r\n\ttabs\n ",
    "I'm we'LL they'd it'S 'tis don\u2019t",
    "x" * 40,
    "1234567 3.14 1,000 ½ Ⅷ ٣٤٥",
    "naïve café — “quoted” cafe\u0301",
    "日本語のテキスト、한국어, 中文。",
    "हिन्दी ไทย العربية",
    "foo_bar(x)[0] += 1; // a/b\n    return {};\n",
    "CamelCaseWord ÉCOLE HTTPServer",
    "a.b.c !!! ?... $5 <tag/> #1 @me",
    "👩\u200d👩\u200d👧 🎉🎉 \u200b",
    "\u0000\u0001\ufeff",
)
_TOKENS_PER_TEXT = 32


def tokenizer_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Make the key-values. Raises UnsupportedModelError."""
    tokenizer = checkpoint.load_tokenizer()
    state = json.loads(tokenizer.to_json())
    model = state["model"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise _refusal(
            f"its model is {model['type']}; only BPE without prefixes and suffixes is supported"
        )
    values = _tokens(state, checkpoint.spec.vocab_size) | _special(tokenizer, state, checkpoint)
    if tokenizer.vocabulary.byte_level:
        merges = [" ".join(merge) for merge in model["merges"]]
        values |= {"model": "gpt2", "pre": _pre_tokenizer(state), "merges": merges}
    else:
        values |= {
            "model": "llama",
            "pre": "default",
            "scores": _scores(state, len(values["tokens"])),
        }
    values["add_space_prefix"] = tokenizer.vocabulary.strip_space
    named = {f"{_PREFIX}{key}": value for key, value in values.items()}
    spec, template = checkpoint.spec, checkpoint.chat_template or ""
    of_model = {
        "general.architecture": gguf_layout(spec.architecture).architectures[0],
        "general.name": spec.name,
        # The writer reports a template that is not valid Unicode.
        "tokenizer.chat_template": template.encode(errors="replace").decode(),
    }
    takes_space = any(token["rstrip"] for token in state["added_tokens"])
    if takes_space != has_phi3_space(named | of_model):
        named[PHI3_SPACE] = takes_space
    # Names and keys of llama.cpp say too much or too little about some lists of end tokens.
    if _read(named | of_model).eos_ids != tokenizer.eos_ids:
        named[END_LIST] = np.array(sorted(tokenizer.eos_ids), np.int32)
    _check(tokenizer, named | of_model)
    return named | _templates(checkpoint)


def _refusal(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tokenizer.json: a GGUF file cannot describe this tokenizer ({reason}); "
        "try llama.cpp's convert_hf_to_gguf.py"
    )


def _tokens(state: dict[str, Any], count: int) -> dict[str, Any]:
    vocab, unknown = state["model"]["vocab"], state["model"]["unk_token"]
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = {token_id: token for token, token_id in vocab.items()} | {
        token_id: token["content"] for token_id, token in added.items()
    }
    if max(tokens, default=0) >= count:
        raise _refusal(f"it has a token {max(tokens):,}, but the embedding has {count:,} rows")

    def kind(token_id: int) -> int:
        token = tokens.get(token_id)
        if token is None:
            return _UNUSED
        if token == unknown:
            return _UNKNOWN
        if token_id in added:
            return _CONTROL if added[token_id]["special"] else _USER_DEFINED
        if state["model"]["byte_fallback"] and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return _BYTE
        return _NORMAL

    named = [tokens.get(token_id, f"[PAD{token_id}]") for token_id in range(count)]
    return {
        "tokens": named,
        "token_type": np.array([kind(token_id) for token_id in range(count)], np.int32),
    }


def _special(tokenizer: Tokenizer, state: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    assert isinstance(checkpoint.tokenizer_source, Path)
    path = find(checkpoint.tokenizer_source, "tokenizer_config.json")
    padding = read_json(path).get("pad_token") if path else None
    padding = padding.get("content") if isinstance(padding, dict) else padding
    ids = state["model"]["vocab"] | {
        token["content"]: token["id"] for token in state["added_tokens"]
    }
    special = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "unknown": ids.get(state["model"]["unk_token"]),
    }
    if isinstance(padding, str):
        special["padding"] = ids.get(padding)
    # A known name ends a response without a key. llama.cpp reads two further ends by key.
    control = {token["content"] for token in state["added_tokens"] if token["special"]}
    added = {token["content"] for token in state["added_tokens"]}
    by_name = {tokenizer.eos_id, *(ids[name] for name in end_names(control, added))}
    special |= dict(zip(("eot", "eom"), sorted(tokenizer.eos_ids - by_name), strict=False))

    add_bos, add_eos = _adds_bos_eos(tokenizer)
    values: dict[str, Any] = {
        f"{name}_token_id": token_id for name, token_id in special.items() if token_id is not None
    }
    return values | {"add_bos_token": add_bos, "add_eos_token": add_eos}


def _adds_bos_eos(tokenizer: Tokenizer) -> tuple[bool, bool]:
    plain, with_special = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    for bos in (False, True):
        for eos in (False, True):
            if with_special == [tokenizer.bos_id] * bos + plain + [tokenizer.eos_id] * eos:
                return bos, eos
    raise _refusal("it surrounds a text with tokens other than BOS and EOS")


def _pre_tokenizer(state: dict[str, Any]) -> str:
    splits = _splits(state["pre_tokenizer"])
    whole_words = bool(state["model"].get("ignore_merges"))
    composes = state["normalizer"] == {"type": "NFC"}
    if state["normalizer"] is None or composes:
        for name, rule in PRE_TOKENIZERS.items():
            settings = (rule.whole_words, rule.composes)
            if splits == [*rule.expressions, None] and settings == (whole_words, composes):
                return name
    raise _refusal("its pre-tokenizer with its normalizer matches no known rule of llama.cpp")


def _splits(part: Any) -> list[str | None]:
    match part:
        case {"type": "Sequence", "pretokenizers": parts}:
            return [split for part in parts for split in _splits(part)]
        case {
            "type": "Split",
            "pattern": {"Regex": expression},
            "behavior": "Isolated",
            "invert": False,
        }:
            return [expression]
        case {"type": "Digits", "individual_digits": True}:
            return [r"\p{N}"]
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": with_expression}:
            return [*_GPT2, None] if with_expression else [None]
    return [None, None]


def _scores(state: dict[str, Any], count: int) -> Floats:
    merges, vocab = state["model"]["merges"], state["model"]["vocab"]
    scores = np.full(count, -len(merges), np.float32)
    for rank in range(len(merges) - 1, -1, -1):
        scores[vocab["".join(merges[rank])]] = -rank
    return scores


def _read(values: dict[str, Any]) -> Tokenizer:
    try:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(
                gguf_file_layout({key: raw(value) for key, value in values.items()}, []).header
            )
            file.flush()
            return tokenizer_from_gguf(read_gguf(Path(file.name)).metadata)
    except OSError as error:
        raise HeadraceError(
            f"a temporary file in {tempfile.gettempdir()}: {error.strerror or error}; "
            "free space there, or set TMPDIR to another folder"
        ) from error
    except HeadraceError as error:
        raise _refusal(error.reason) from error


def _check(tokenizer: Tokenizer, values: dict[str, Any]) -> None:
    written = _read(values)
    # SentencePiece models have default ids.
    for name in ("bos_id", "eos_id", "eos_ids"):
        value, expected = getattr(written, name), getattr(tokenizer, name)
        if value != expected:
            raise _refusal(f"{name} would be {value} instead of {expected}")
    for text in _texts(tokenizer, values[f"{_PREFIX}token_type"].tolist()):
        for parse_special in (False, True):
            expected_ids = tokenizer.encode(text, parse_special=parse_special)
            if written.encode(text, parse_special=parse_special) != expected_ids:
                raise _refusal(f"{text[:60]!r} would become other tokens")


def _texts(tokenizer: Tokenizer, types: list[int]) -> Iterator[str]:
    yield from _TEXTS
    for first in range(0, len(types), _TOKENS_PER_TEXT):
        text = ""
        for token_id in range(first, min(first + _TOKENS_PER_TEXT, len(types))):
            token = tokenizer.token_bytes(token_id).decode(errors="replace")
            text += f"one {token} two{token}three" if types[token_id] in _ADDED else token
        yield text


def _templates(checkpoint: Checkpoint) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if checkpoint.chat_template:
        values["tokenizer.chat_template"] = checkpoint.chat_template
    others = dict(checkpoint.other_templates)
    if checkpoint.tool_template:
        others["tool_use"] = checkpoint.tool_template
    if others:
        values["tokenizer.chat_templates"] = sorted(others)
        values |= {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
    return values
