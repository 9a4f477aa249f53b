"""Grammars over the vocabulary of a tokenizer, by llguidance, which no other module imports.

A grammar that allows a single text allows only the tokenizer's own tokens of it.
"""

import importlib
import json
import re
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from time import monotonic
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from headrace.constraint import GrammarState, Mask, mask_words
from headrace.errors import ConstraintError, HeadraceError, RequestError
from headrace.grammar.cost import check_cost
from headrace.json_schema import subschemas
from headrace.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_MAX_COMPILED = 64
_MAX_USES = 100
"""Requests that share a lexer, which grows with the texts."""
_MAX_FORCED_CHARACTERS = 256
_MAX_TOKENISED = 4096
"""Texts with cached tokens: a grammar forces the same texts again and again."""
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,  # tens of milliseconds to compile
    "step_lexer_fuel": 100_000,  # a few milliseconds of a mask
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # tens of megabytes
    "max_grammar_size": 120_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""A grammar beyond these limits fails to compile, or fails its request later."""
_JSON: "JsonCompileOptions" = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
"""JSON as `json.dumps` writes it: small models may write free white space without end."""


_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_SEARCH_SECONDS = 0.2
"""Time to find the wrong part of a schema, by compiling its parts."""
_Key = tuple[str, str]


class Vocabulary(Protocol):
    @property
    def special_ids(self) -> Collection[int]: ...  # control tokens, which have no text
    def token_bytes(self, token_id: int) -> bytes: ...
    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...


class Grammars:
    """Compiles and caches grammars over the first `vocab_size` tokens, in any thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[_Key, tuple[int, LLMatcher]] = OrderedDict()
        """Grammars with their remaining uses; the least recently used first."""
        self._lock = Lock()

    def compile(self, outputs: StructuredOutputs) -> GrammarState:
        """The state at the beginning of a text. Raises RequestError, which names the field."""
        key = _key(outputs)
        with self._lock:
            uses_left, matcher = self._compiled.get(key, (0, None))
        if matcher is None or not uses_left:
            uses_left, matcher = _MAX_USES, self._compile(*key, outputs)
        with self._lock:
            self._compiled[key] = uses_left - 1, matcher
            self._compiled.move_to_end(key)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return _State(matcher.deep_copy(), self._vocab_size)

    def _compile(self, field: str, text: str, outputs: StructuredOutputs) -> "LLMatcher":
        llguidance = _llguidance()
        name = outputs.field or field
        check_cost(field, text, name)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(
                    _Tokens(self._vocabulary, self._vocab_size)
                )
        grammar = _grammar(llguidance, outputs, name)
        matcher, message = self._matcher(llguidance, grammar)
        if matcher is None:
            raise RequestError(self._reason(llguidance, outputs, name, message))
        mask = np.zeros(mask_words(self._vocab_size), np.uint32)
        with suppress(ConstraintError):  # the mask stays empty
            _State(matcher, self._vocab_size).fill(mask)
        if not mask.any():
            raise RequestError(f"{name} allows no text that the tokenizer can write; change it")
        return matcher

    def _matcher(self, llguidance: ModuleType, grammar: str) -> tuple["LLMatcher | None", str]:
        """A compiled grammar, or None and the reason."""
        limits = llguidance.LLParserLimits(**_LIMITS)
        try:
            matcher: LLMatcher = llguidance.LLMatcher(
                self._tokenizer, grammar, log_level=0, limits=limits
            )
        except ValueError as error:
            return None, str(error)
        message = matcher.get_error()
        return (None, message) if message else (matcher, "")

    def _reason(
        self, llguidance: ModuleType, outputs: StructuredOutputs, name: str, message: str
    ) -> str:
        """The message for a grammar that does not compile, with the path of the wrong schema."""
        schemas = [*outputs.tool_schemas]
        if outputs.json is not None:
            schemas = [(name, str(outputs.json))]
        for path, text in schemas:
            wrong, reason = self._wrong_schema(llguidance, path, json.loads(text))
            if "coerce_one_of" in reason:
                return (
                    f"{wrong}.oneOf has schemas that overlap, which cannot be enforced; use "
                    "anyOf, or set strict to false to read it as anyOf"
                )
            if wrong:
                return f"{wrong} cannot be compiled: {_shortened(reason)}; change this schema"
        if outputs.tool_schemas:
            return f"{name} cannot be compiled together; send fewer tools, or simpler parameters"
        return f"{name} cannot be compiled: {_shortened(message)}"

    def _wrong_schema(
        self, llguidance: ModuleType, path: str, root: dict[str, Any]
    ) -> tuple[str, str]:
        """The path of the smallest part with the same error, or an empty path."""
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        found, reason = "", ""
        parts = [(path, dict[str, Any](root))]
        deadline = monotonic() + _SEARCH_SECONDS
        while parts and monotonic() < deadline:
            path, schema = parts.pop(0)
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps({**shared, **schema}), defaults=_JSON
            )
            matcher, message = self._matcher(llguidance, grammar)
            if matcher is None and (not reason or message == reason):
                found, reason = path, message
                parts = [(where, dict(part)) for where, part in subschemas(schema, path)]
        return found, reason


class _State:
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
            raise ConstraintError(f"the grammar cannot continue: {_shortened(matcher.get_error())}")
        return type(self)(matcher, self._vocab_size)

    def fill(self, mask: Mask) -> None:
        bits = np.empty(mask_words(self._vocab_size + 1), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(
                f"the grammar cannot continue: {_shortened(self._matcher.get_error())}"
            )
        word, bit = divmod(self._vocab_size, 32)
        bits[word] &= ~np.uint32(1 << bit)  # the token of the text's end
        mask[:] = bits[: len(mask)]


class _Tokens:
    """A tokenizer for llguidance, with one more token for the end of the text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocab_size)]
        if not any(self.tokens):
            raise RequestError(
                "structured_outputs needs a tokenizer with text, which this model lacks; leave it "
                "out"
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
        self._cached_encode = lru_cache(_MAX_TOKENISED)(self._encode)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text; llguidance may pass a long text, whose end is left out."""
        return self._cached_encode(text[:_MAX_FORCED_CHARACTERS])

    def _encode(self, text: str) -> list[int]:
        data = text.encode()
        with suppress(HeadraceError):  # some tokenizers cannot encode every text
            ids = self._vocabulary.encode(text, add_special=False, parse_special=False)
            is_known = all(token < self.eos_token_id for token in ids)
            if is_known and b"".join([self.tokens[token] for token in ids]) == data:
                return ids
        # The tokenizer adds a space, or writes another text.
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._by_text), 0)
            if not size:
                break
            ids.append(self._by_text[data[:size]])
            data = data[size:]
        return ids


def _key(outputs: StructuredOutputs) -> _Key:
    if outputs.choice is not None:
        return "choice", json.dumps(outputs.choice)
    return next(
        (name, str(text))
        for name in ("json", "regex", "grammar", "json_object")
        if (text := getattr(outputs, name))
    )


def _grammar(llguidance: ModuleType, outputs: StructuredOutputs, name: str) -> str:
    matcher: type[LLMatcher] = llguidance.LLMatcher
    if outputs.regex is not None:
        return matcher.grammar_from_regex(outputs.regex)
    if outputs.grammar is not None:
        return matcher.grammar_from_lark(_lark(outputs.grammar, name))
    if outputs.choice is not None:
        choices = [json.dumps(text, ensure_ascii=False) for text in outputs.choice]
        return matcher.grammar_from_lark("start: " + " | ".join(choices))
    schema = '{"type": "object"}' if outputs.json is None else str(outputs.json)
    return matcher.grammar_from_json_schema(schema, defaults=_JSON)


def _lark(text: str, name: str) -> str:
    """A Lark grammar, converted if it has rules of GBNF (`name ::= `)."""
    if not _GBNF_RULE.search(text):
        return text
    converter = importlib.import_module("llguidance.gbnf_to_lark")
    try:
        lark = str(converter.gbnf_to_lark(text))
    except Exception as error:  # of any kind: the text is the user's
        raise RequestError(
            f"{name} is not GBNF: {_shortened(str(error))}; correct it, or write Lark with `start:`"
        ) from None
    check_cost("grammar", lark, name)
    return lark


def _llguidance() -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise RequestError(
            "structured_outputs needs llguidance; pip install headrace[structured]"
        ) from None


def _shortened(message: str) -> str:
    return " ".join(message.split())[:300]
