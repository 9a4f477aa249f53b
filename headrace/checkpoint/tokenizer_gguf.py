"""Tokenizers from GGUF metadata: BPE and unigram models (Kudo 2018)."""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, processors

from headrace import _native
from headrace.checkpoint.end_tokens import END_TOKENS, excluded_names
from headrace.checkpoint.gguf import Metadata
from headrace.checkpoint.pretokenizers import pre_tokenizer
from headrace.checkpoint.tokenizer import (
    BYTE_CHARACTERS,
    Tokenizer,
    Vocabulary,
    library_calls,
)
from headrace.checkpoint.tokenizer_growth import check_growth
from headrace.errors import FormatError, UnsupportedModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # matched before the text is split
_NEVER = -1e6
_MAX_PIECE = 512
"""Merges of a SentencePiece token take quadratic time."""
_MAX_MERGES = 8
"""Real vocabularies have two or three."""

_END_KEYS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Tokens that end a response, besides `eos`; llama.cpp ends at the same."""
END_LIST = "headrace.eos_token_ids"
"""Our key for a complete list of end tokens; `convert` writes it if the other keys say less."""

PHI3_SPACE = "headrace.phi3_space"
"""Our key for tokens that take white space as in Phi-3; `convert` writes it if names say else."""
_PHI3 = re.compile(r"phi[ _-]?3")
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")

_PREFIX = "tokenizer.ggml."
_log = logging.getLogger("headrace.checkpoint")


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """Raises FormatError or UnsupportedModelError."""
    model = metadata.string(f"{_PREFIX}model")
    tokens = metadata.strings(f"{_PREFIX}tokens")
    types = _token_types(metadata, len(tokens))
    vocab = _vocabulary(metadata, tokens, types)
    tokens = list(vocab)
    with library_calls(metadata.where):
        if model == "gpt2":
            rule = pre_tokenizer(metadata.string(f"{_PREFIX}pre", "default"))
            backend = tokenizers.Tokenizer(_byte_level_model(metadata, vocab, rule.whole_words))
            backend.pre_tokenizer = rule.build()
            if rule.composes:
                backend.normalizer = normalizers.NFC()
            adds_bos, adds_eos, space, bos, eos = rule.adds_bos, False, False, None, None
        elif model in ("llama", "t5"):
            is_bpe, space = model == "llama", metadata.flag(f"{_PREFIX}add_space_prefix", True)
            build = _sentencepiece_model if is_bpe else _unigram_model
            backend = tokenizers.Tokenizer(build(metadata, vocab, types))
            backend.normalizer = _sentencepiece_normalizer(metadata, space)
            check_growth(backend, metadata.where)
            adds_bos, adds_eos = is_bpe, not is_bpe
            bos, eos = (1, 2) if is_bpe else (None, 1)
        else:
            raise UnsupportedModelError(
                f"{metadata.where}: {_PREFIX}model {model[:80]!r} is not supported; "
                "supported: gpt2, llama, t5"
            )
        backend.add_tokens(_added_tokens(metadata, tokens, types))
        bos_id = _token_id(metadata, "bos", len(tokens), bos)
        eos_id = _token_id(metadata, "eos", len(tokens), eos)
        first = bos_id if metadata.flag(f"{_PREFIX}add_bos_token", adds_bos) else None
        last = eos_id if metadata.flag(f"{_PREFIX}add_eos_token", adds_eos) else None
        _surround(backend, first, last)

    listed = _listed_ends(metadata, len(tokens))
    vocabulary = Vocabulary(
        byte_level=model == "gpt2",
        strip_space=space,
        bos_id=bos_id,
        eos_id=eos_id,
        end_ids=_ends_by_key(metadata, tokens, types) if listed is None else listed,
        has_end_list=listed is not None,
    )
    return Tokenizer(backend, vocabulary, metadata.where)


def _vocabulary(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return token to id, in the order of ids.

    An empty token gets llama.cpp's name for it, and an unused duplicate a name of its own; their
    types become `_UNUSED`. Raises FormatError for other duplicates.
    """
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) == len(tokens) and "" not in ids:
        return ids  # as in nearly all files
    counts = Counter(tokens)
    made = _made_tokens(metadata) if len(counts) < len(tokens) else frozenset()
    used = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if counts[token] > 1 and kind != _UNUSED
    }
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        is_unused = types[token_id] == _UNUSED and token in used
        if token in vocab:
            is_unused = types[token_id] == _UNUSED or (
                types[token_id] == _NORMAL and made is not None and token not in made
            )
            if not is_unused and token:
                raise FormatError(
                    f"{metadata.where}: {_PREFIX}tokens: {token[:80]!r} appears twice, with the "
                    f"ids {vocab[token]:,} and {token_id:,}; give one of them another name, or the "
                    f"type {_UNUSED} (unused)"
                )
        if not token or is_unused:
            token = f"[EMPTY_{token_id}]" if not token else f"[UNUSED_{token_id}]"
            while token in counts:
                token += "_"
            types[token_id] = _UNUSED
        vocab[token] = token_id
    return vocab


def _made_tokens(metadata: Metadata) -> frozenset[str] | None:
    """Return the tokens that text can become; None if that depends on scores."""
    if metadata.string(f"{_PREFIX}model") != "gpt2":
        return None
    merges = metadata.strings(f"{_PREFIX}merges")
    return frozenset(merge.replace(" ", "") for merge in merges) | BYTE_CHARACTERS


def _token_types(metadata: Metadata, count: int) -> list[int]:
    key = f"{_PREFIX}token_type"
    if key not in metadata:
        return [_NORMAL] * count
    types = metadata.numbers(key)
    if len(types) != count:
        raise FormatError(
            f"{metadata.where}: {key} has {len(types):,} entries for {count:,} tokens"
        )
    return list(types.tolist())


def _token_id(metadata: Metadata, name: str, count: int, default: int | None) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    if key not in metadata:
        return default if default is not None and default < count else None
    token_id = metadata.integer(key)
    if 0 <= token_id < count:
        return token_id
    # Some converters write 2**32 - 1 for "none".
    _log.warning(
        "%s: %s is %s, but the vocabulary has %s tokens; the key is ignored, as in llama.cpp",
        metadata.where,
        key,
        f"{token_id:,}",
        f"{count:,}",
    )
    return default if default is not None and default < count else None


def _listed_ends(metadata: Metadata, count: int) -> frozenset[int] | None:
    if END_LIST not in metadata:
        return None
    ids = [int(token_id) for token_id in metadata.numbers(END_LIST)]
    if any(not 0 <= token_id < count for token_id in ids):
        raise FormatError(
            f"{metadata.where}: {END_LIST} has ids outside of the vocabulary of {count:,} tokens"
        )
    return frozenset(ids)


def _ends_by_key(metadata: Metadata, tokens: list[str], types: list[int]) -> frozenset[int]:
    added = {token for token, kind in zip(tokens, types, strict=True) if kind in _ADDED}
    excluded = excluded_names(added)
    ids = (_token_id(metadata, name, len(tokens), None) for name in _END_KEYS)
    return frozenset(end for end in ids if end is not None and tokens[end] not in excluded)


def _added_tokens(metadata: Metadata, tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Return the tokens that are matched before the text is split.

    Old converters marked the ends of turns as user-defined, so one that the chat template writes
    is a control token. A GGUF file cannot say that white space after a token belongs to it.
    Phi-3's tokenizer.json does, so the model's name decides, as in llama.cpp.
    """
    template = "" if END_LIST in metadata else metadata.string("tokenizer.chat_template", "")
    is_phi3 = metadata.flag(PHI3_SPACE, has_phi3_space(metadata))
    return [
        AddedToken(
            token,
            normalized=False,
            special=kind != _USER_DEFINED or (token in END_TOKENS and token in template),
            rstrip=is_phi3 and token not in _PHI3_KEEPS_SPACE,
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in _ADDED
    ]


def has_phi3_space(metadata: Mapping[str, Any]) -> bool:
    """Whether the names in a file's metadata say that the tokenizer is that of Phi-3."""
    if metadata[f"{_PREFIX}model"] != "llama":
        return False
    name, architecture = (metadata.get(f"general.{key}", "") for key in ("name", "architecture"))
    return architecture == "phi3" or bool(_PHI3.search(str(name).lower()))


def _byte_level_model(metadata: Metadata, vocab: dict[str, int], whole_words: bool) -> models.BPE:
    pairs = _native.cut_at_space(metadata.strings(f"{_PREFIX}merges"))
    with library_calls(f"{metadata.where}: {_PREFIX}merges"):
        return models.BPE(vocab, pairs, ignore_merges=whole_words)


def _sentencepiece_model(metadata: Metadata, vocab: dict[str, int], types: list[int]) -> models.BPE:
    scores = _scores(metadata, len(vocab))
    unknown = next(
        (token for token, kind in zip(vocab, types, strict=True) if kind == _UNKNOWN), None
    )
    merges = _merges_from_scores(metadata, vocab, types, scores)
    with library_calls(f"{metadata.where}: {_PREFIX}tokens"):
        return models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _unigram_model(metadata: Metadata, vocab: dict[str, int], types: list[int]) -> models.Unigram:
    """Control tokens get scores below any spelling, because the library matches all tokens."""
    in_text = (_NORMAL, _USER_DEFINED)
    typed_tokens = list(zip(vocab, types, strict=True))
    characters = {token for token, kind in typed_tokens if kind in in_text and len(token) == 1}
    if unspelt := next(
        (
            token
            for token, kind in typed_tokens
            if kind not in in_text and not characters.issuperset(token)
        ),
        "",
    ):
        raise UnsupportedModelError(
            f"{metadata.where}: {_PREFIX}tokens: {unspelt[:80]!r} cannot be spelt in other tokens"
        )
    scores = [
        score if kind in in_text else _NEVER
        for score, kind in zip(_scores(metadata, len(vocab)), types, strict=True)
    ]
    unknown = next((i for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    with library_calls(f"{metadata.where}: {_PREFIX}tokens"):
        return models.Unigram(list(zip(vocab, scores, strict=True)), unknown, _BYTE in types)


def _sentencepiece_normalizer(metadata: Metadata, space: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if f"{_PREFIX}precompiled_charsmap" in metadata:
        steps.append(
            normalizers.Precompiled(
                metadata.numbers(f"{_PREFIX}precompiled_charsmap").astype("uint8").tobytes()
            )
        )
    once = metadata.flag(f"{_PREFIX}remove_extra_whitespaces", False)
    if once:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if space:
        steps.append(normalizers.Prepend("\u2581"))
    steps.append(normalizers.Replace(" ", "\u2581"))
    if once:
        steps.append(normalizers.Replace(Regex("\u2581+\\z"), ""))
    return normalizers.Sequence(steps)


def _scores(metadata: Metadata, count: int) -> list[float]:
    scores = metadata.numbers(f"{_PREFIX}scores")
    if len(scores) != count:
        raise FormatError(
            f"{metadata.where}: {_PREFIX}scores has {len(scores):,} entries for {count:,} tokens"
        )
    return list(scores.tolist())


def _merges_from_scores(
    metadata: Metadata, vocab: dict[str, int], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    tokens = list(vocab)
    ranked: list[tuple[float, int, int, int, int]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind != _NORMAL:
            continue
        if len(token) > _MAX_PIECE or len(ranked) > _MAX_MERGES * len(tokens):
            raise FormatError(
                f"{metadata.where}: {_PREFIX}tokens: not a vocabulary of SentencePiece"
            )
        splits = [
            (vocab[token[:i]], vocab[token[i:]], i)
            for i in range(1, len(token))
            if token[:i] in vocab and token[i:] in vocab
        ]
        ranked += [(score, i, len(token) - i, left, right) for left, right, i in sorted(splits)]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(tokens[left], tokens[right]) for _, _, _, left, right in ranked]


def _surround(backend: tokenizers.Tokenizer, first: int | None, last: int | None) -> None:
    special = [
        (name, token_id)
        for name, token_id in (("first", first), ("last", last))
        if token_id is not None
    ]
    template = ["first:0"] * (first is not None) + ["$A:0"] + ["last:0"] * (last is not None)
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(template), special_tokens=special
    )
