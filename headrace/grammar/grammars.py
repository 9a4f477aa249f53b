"""Grammars over the vocabulary of a tokenizer, compiled and followed by llguidance, which is needed
for nothing else.

llguidance reads the text of an output byte by byte: a lexer of regular-expression derivatives below
an Earley parser. Which tokens may follow it finds by walking a trie of all of them, in tens of
microseconds. Where the grammar leaves but one text, it allows the token that the tokenizer would
write it with alone.
"""

import importlib
import json
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from headrace.constraint import GrammarState, Mask, mask_words
from headrace.errors import ConstraintError, HeadraceError, RequestError
from headrace.grammar.cost import check_cost
from headrace.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_MOST_COMPILED = 64
"""Most grammars that are kept compiled; the least recently used is dropped first."""
_MOST_USES = 100
"""Requests after which a grammar is compiled again: they share its lexer, which grows with the
texts that it sees.
"""
_MOST_WRITTEN = 256
"""Characters of a certain text that are tokenised ahead of it."""
_MOST_KEPT = 4096
"""Most texts whose tokens are kept: those of a grammar come again and again."""
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,  # tens of milliseconds to compile
    "step_lexer_fuel": 100_000,  # a few milliseconds of a mask
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # tens of megabytes
    "max_grammar_size": 120_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Of llguidance: a text that breaks one cannot be compiled, or its requests fail where they come to
it.
"""
_JSON: "JsonCompileOptions" = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
"""JSON as Python's `json.dumps` writes it: where white space is free, a small model may write it
without an end.
"""


_Key = tuple[str, str]
"""The field of a `StructuredOutputs` that is given, and its text."""


class Vocabulary(Protocol):
    """The part of a tokenizer that grammars need."""

    @property
    def special_ids(self) -> Collection[int]: ...  # control tokens, which are no text
    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str, add_special: bool) -> list[int]: ...


class Grammars:
    """Compiles what is asked of outputs, over the first `vocab_size` tokens of a vocabulary. Any
    thread may ask it to.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[_Key, tuple[int, LLMatcher]] = OrderedDict()
        """Each with the requests that it may still serve; the least recently used first."""
        self._lock = Lock()

    def compile(self, asked: StructuredOutputs) -> GrammarState:
        """The beginning of a text as it is asked for. Raises RequestError, which names the field,
        for what cannot be compiled.
        """
        key = _key(asked)
        with self._lock:
            left, found = self._compiled.get(key, (0, None))
        if found is None or not left:
            left, found = _MOST_USES, self._compile(*key, asked)
        with self._lock:
            self._compiled[key] = left - 1, found
            self._compiled.move_to_end(key)
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            return _State(found.deep_copy(), self._vocab_size)

    def _compile(self, field: str, text: str, asked: StructuredOutputs) -> "LLMatcher":
        llguidance = _llguidance()
        check_cost(field, text)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(
                    _Tokens(self._vocabulary, self._vocab_size)
                )
        limits = llguidance.LLParserLimits(**_LIMITS)
        try:
            matcher: LLMatcher = llguidance.LLMatcher(
                self._tokenizer, _grammar(llguidance.LLMatcher, asked), log_level=0, limits=limits
            )
        except ValueError as error:
            raise RequestError(f"{field} cannot be compiled: {_shortened(str(error))}") from None
        if message := matcher.get_error():
            raise RequestError(f"{field} cannot be compiled: {_shortened(message)}")
        mask = np.zeros(mask_words(self._vocab_size), np.uint32)
        with suppress(ConstraintError):  # there is nothing in the mask then
            _State(matcher, self._vocab_size).fill(mask)
        if not mask.any():
            raise RequestError(f"{field} allows no text that the tokenizer could write")
        return matcher


class _State:
    """A place in a grammar: a matcher of llguidance that consumes nothing any more."""

    __slots__ = ("_matcher", "_vocab_size")

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    def after(self, token: int) -> Self:
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(token):
            raise ConstraintError(f"the grammar cannot go on: {_shortened(matcher.get_error())}")
        return type(self)(matcher, self._vocab_size)

    def fill(self, mask: Mask) -> None:
        bits = np.empty(mask_words(self._vocab_size + 1), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(
                f"the grammar cannot go on: {_shortened(self._matcher.get_error())}"
            )
        word, bit = divmod(self._vocab_size, 32)
        bits[word] &= ~np.uint32(1 << bit)  # the end of the text
        mask[:] = bits[: len(mask)]


class _Tokens:
    """The vocabulary as llguidance wants it: with a token more, which stands for the end of the
    text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocab_size)]
        if not any(self.tokens):
            raise RequestError(
                "structured_outputs needs a tokenizer, and this model has none with text"
            )
        self.tokens.append(b"<end>")
        self.eos_token_id = vocab_size
        self.special_token_ids = sorted(
            {token for token in vocabulary.special_ids if token < vocab_size} | {vocab_size}
        )
        self._by_text = {
            text: token for token, text in reversed(list(enumerate(self.tokens[:-1]))) if text
        }
        for token in self.special_token_ids:
            self._by_text.pop(self.tokens[token], None)
        self._longest = max(map(len, self._by_text), default=0)
        self._written = lru_cache(_MOST_KEPT)(self._write)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text, or of its beginning, where it is long."""
        return self._written(text[:_MOST_WRITTEN])

    def _write(self, text: str) -> list[int]:
        with suppress(HeadraceError):  # some tokenizers cannot encode every text
            ids = self._vocabulary.encode(text, add_special=False)
            if (
                all(token < self.eos_token_id for token in ids)
                and b"".join([self.tokens[token] for token in ids]) == text.encode()
            ):
                return ids
        return self._longest_first(text.encode())  # where it adds a space, or writes another text

    def _longest_first(self, data: bytes) -> list[int]:
        """The tokens of these bytes, each as long as can be, up to where there is none."""
        ids: list[int] = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._by_text), 0)
            if not size:
                break
            ids.append(self._by_text[data[:size]])
            data = data[size:]
        return ids


def _key(asked: StructuredOutputs) -> _Key:
    if asked.choice is not None:
        return "choice", json.dumps(asked.choice)
    return next(
        (name, str(text))
        for name in ("json", "regex", "grammar", "json_object")
        if (text := getattr(asked, name))
    )


def _grammar(matcher: "type[LLMatcher]", asked: StructuredOutputs) -> str:
    """What is asked for, as llguidance has it. Raises ValueError for what it cannot read."""
    if asked.regex is not None:
        return matcher.grammar_from_regex(asked.regex)
    if asked.grammar is not None:
        return matcher.grammar_from_lark(asked.grammar)
    if asked.choice is not None:
        return matcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
        )
    return matcher.grammar_from_json_schema(
        str(asked.json) if asked.json is not None else '{"type": "object"}', defaults=_JSON
    )


def _llguidance() -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise RequestError(
            "structured_outputs needs llguidance: pip install headrace[structured]"
        ) from None


def _shortened(message: str) -> str:
    """A message of llguidance in one line."""
    return " ".join(message.split())[:300]
