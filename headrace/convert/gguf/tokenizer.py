"""The tokenizer of a folder as the key-values of a GGUF file (`tokenizer.*`; ggml, `docs/gguf.md`):
what `tokenizer_gguf.py` reads.

Byte-level BPE goes with the name of its pre-tokenizer; SentencePiece's BPE, which `tokenizer.json`
has as merges, with scores that rank them. That it is the same tokenizer is tried on texts, and on
all tokens.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.files import find, read_json
from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.pretokenizers import PRE_TOKENIZERS
from headrace.checkpoint.tokenizer import END_OF_GENERATION, Tokenizer
from headrace.checkpoint.tokenizer_gguf import tokenizer_from_gguf
from headrace.convert.gguf.header import gguf_plan, raw
from headrace.errors import HeadraceError, UnsupportedModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_PREFIX = "tokenizer.ggml."
_GPT2 = PRE_TOKENIZERS["gpt-2"].expressions
_TEXTS = (
    *(
        "",
        " ",
        "Hello, world!",
        "  two  spaces ",
        "line\n\n\nbreaks\r\n\ttabs\n ",
        "I'm we'LL they'd it'S 'tis don\u2019t",
        "x" * 40,
    ),
    *(
        "1234567 3.14 1,000 ½ Ⅷ ٣٤٥",
        "naïve café — “quoted” cafe\u0301",
        "日本語のテキスト、한국어, 中文。",
        "हिन्दी ไทย العربية",
    ),
    *(
        "foo_bar(x)[0] += 1; // a/b\n    return {};\n",
        "CamelCaseWord ÉCOLE HTTPServer",
        "a.b.c !!! ?... $5 <tag/> #1 @me",
    ),
    *("👩\u200d👩\u200d👧 🎉🎉 \u200b", "\u0000\u0001\ufeff"),
)
_TOKENS_TOGETHER = 32
"""Tokens of a text that is made of them."""


def tokenizer_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """The key-values, with those of the chat templates. Raises UnsupportedModelError where no GGUF
    file describes the same tokenizer.
    """
    tokenizer = checkpoint.load_tokenizer()
    state = json.loads(tokenizer.to_json())
    model = state["model"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise _refusal(
            f"its model is {model['type']}, and BPE alone is written, without prefixes and suffixes"
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
    _check(tokenizer, named)
    return named | _templates(checkpoint)


def _refusal(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tokenizer.json: no GGUF file describes this tokenizer ({why}): llama.cpp's "
        "convert_hf_to_gguf.py may know more of it"
    )


def _tokens(state: dict[str, Any], count: int) -> dict[str, Any]:
    """All tokens with their types; rows of the embedding that have none are padding."""
    vocab, unknown = state["model"]["vocab"], state["model"]["unk_token"]
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = {token_id: token for token, token_id in vocab.items()} | {
        token_id: token["content"] for token_id, token in added.items()
    }
    if max(tokens, default=0) >= count:
        raise _refusal(f"it has a token {max(tokens):,}, and the embedding {count:,} rows")

    def kind(token_id: int) -> int:
        token = tokens.get(token_id)
        if token is None:
            return _UNUSED
        if token == unknown:
            return _UNKNOWN
        if token_id in added:
            return _CONTROL if added[token_id]["special"] else _USER_DEFINED
        return (
            _BYTE
            if state["model"]["byte_fallback"] and re.fullmatch("<0x[0-9A-F]{2}>", token)
            else _NORMAL
        )

    named = [tokens.get(token_id, f"[PAD{token_id}]") for token_id in range(count)]
    return {
        "tokens": named,
        "token_type": np.array([kind(token_id) for token_id in range(count)], np.int32),
    }


def _special(tokenizer: Tokenizer, state: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The ids of tokens with a meaning, and which of them are put around a text."""
    assert isinstance(checkpoint.tokenizer_source, Path)
    path = find(checkpoint.tokenizer_source, "tokenizer_config.json")
    padding = read_json(path).get("pad_token") if path else None
    padding = padding.get("content") if isinstance(padding, dict) else padding
    ids = state["model"]["vocab"] | {
        token["content"]: token["id"] for token in state["added_tokens"]
    }
    found = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "unknown": ids.get(state["model"]["unk_token"]),
    }
    if isinstance(padding, str):
        found["padding"] = ids.get(padding)
    # Tokens with a known name end an answer whatever the file says.
    ends = tokenizer.eos_ids - {tokenizer.eos_id, *(ids.get(name) for name in END_OF_GENERATION)}
    found |= dict(zip(("eot", "eom"), sorted(ends), strict=False))
    first, last = _around(tokenizer)
    values: dict[str, Any] = {
        f"{name}_token_id": token_id for name, token_id in found.items() if token_id is not None
    }
    return values | {"add_bos_token": first, "add_eos_token": last}


def _around(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether BOS is put before every text, and EOS behind it."""
    plain, whole = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    for first in (False, True):
        for last in (False, True):
            if whole == [tokenizer.bos_id] * first + plain + [tokenizer.eos_id] * last:
                return first, last
    raise _refusal("it puts other tokens around a text than BOS and EOS")


def _pre_tokenizer(state: dict[str, Any]) -> str:
    """The name of the rule that cuts texts as the folder's does."""
    cuts, whole_words = _cuts(state["pre_tokenizer"]), bool(state["model"].get("ignore_merges"))
    composes = state["normalizer"] == {"type": "NFC"}
    if state["normalizer"] is None or composes:
        for name, rule in PRE_TOKENIZERS.items():
            if cuts == [*rule.expressions, None] and (rule.whole_words, rule.composes) == (
                whole_words,
                composes,
            ):
                return name
    raise _refusal("its pre-tokenizer and normalizer together are none of llama.cpp's that we know")


def _cuts(part: Any) -> list[str | None]:
    """The expressions by which a pre-tokenizer cuts, one after the other; None is where bytes are
    spelt as characters, or unknown.
    """
    match part:
        case {"type": "Sequence", "pretokenizers": parts}:
            return [cut for each in parts for cut in _cuts(each)]
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


def _scores(state: dict[str, Any], count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Of each token minus the rank of the first merge that makes it; tokens that none makes come
    last.
    """
    merges, vocab = state["model"]["merges"], state["model"]["vocab"]
    scores = np.full(count, -len(merges), np.float32)
    for rank in range(len(merges) - 1, -1, -1):
        scores[vocab["".join(merges[rank])]] = -rank
    return scores


def _check(tokenizer: Tokenizer, values: dict[str, Any]) -> None:
    """Refuse key-values from which another tokenizer is read."""
    try:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(gguf_plan({key: raw(value) for key, value in values.items()}, []).header)
            file.flush()
            again = tokenizer_from_gguf(read_gguf(Path(file.name)).metadata)
    except OSError as error:
        raise HeadraceError(
            f"a temporary file in {tempfile.gettempdir()}: {error.strerror or error}"
        ) from error
    except HeadraceError as error:
        raise _refusal(str(error)) from error
    # Those of SentencePiece have defaults, and there are keys for three tokens that end an answer.
    for name in ("bos_id", "eos_id", "eos_ids"):
        if (there := getattr(again, name)) != (here := getattr(tokenizer, name)):
            raise _refusal(f"{name} would be {there}, and is {here}")
    for text in _texts(tokenizer, values[f"{_PREFIX}token_type"].tolist()):
        for parse_special in (False, True):
            if tokenizer.encode(text, parse_special=parse_special) != again.encode(
                text, parse_special=parse_special
            ):
                raise _refusal(f"there {text[:60]!r} would be other tokens")


def _texts(tokenizer: Tokenizer, types: list[int]) -> Iterator[str]:
    """Texts to try, among them all tokens in turn, with those that are no part of the model's
    vocabulary in the midst of others.
    """
    yield from _TEXTS
    for first in range(0, len(types), _TOKENS_TOGETHER):
        together = range(first, min(first + _TOKENS_TOGETHER, len(types)))
        spelt = {
            token_id: tokenizer.token_bytes(token_id).decode(errors="replace")
            for token_id in together
        }
        yield "".join(
            f"one {text} two{text}three" if types[i] in _ADDED else text
            for i, text in spelt.items()
        )


def _templates(checkpoint: Checkpoint) -> dict[str, Any]:
    values: dict[str, Any] = (
        {"tokenizer.chat_template": checkpoint.chat_template} if checkpoint.chat_template else {}
    )
    if checkpoint.tool_template:
        values |= {
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": checkpoint.tool_template,
        }
    return values
