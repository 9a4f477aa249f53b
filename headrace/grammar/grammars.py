"""Grammars over the vocabulary of a tokenizer, by llguidance, which no other module imports.

A grammar that allows a single text allows only the tokenizer's own tokens of it.
"""

import importlib
import json
import re
import reprlib
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from time import monotonic
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from headrace.constraint import GrammarState, Mask, mask_words
from headrace.errors import ConstraintError, HeadraceError, RequestError
from headrace.grammar.ascii_classes import with_ascii_classes
from headrace.grammar.cost import check_cost
from headrace.grammar.structural_tag import structural_tag_lark
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


_STATE_BYTES = 20_000
_STATE_BYTES_PER_BYTE = 40
"""Of a state, by bytes of its text: JSON takes 38, an expression 6 (measured over 8,000 tokens)."""

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_SEARCH_SECONDS = 0.2
"""Time to find the wrong part of a schema, by compiling its parts."""
_Key = tuple[str, str, str]
"""Field, text and envelope."""


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
        self._tokens: _Tokens | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[_Key, tuple[int, _State]] = OrderedDict()
        """States at the beginning with their remaining uses; the least recently used first."""
        self._lock = Lock()

    def compile(self, outputs: StructuredOutputs) -> GrammarState:
        """The state at the beginning of a text. Raises RequestError, which names the field."""
        key = _key(outputs)
        with self._lock:
            uses_left, state = self._compiled.get(key, (0, None))
        if state is None or not uses_left:
            uses_left, state = _MAX_USES, self._compile(key[0], key[1], outputs)
        with self._lock:
            self._compiled[key] = uses_left - 1, state
            self._compiled.move_to_end(key)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return state.clone()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that continues another. Raises RequestError."""
        return self._vocabulary_tokens().encode(text)

    def _vocabulary_tokens(self) -> "_Tokens":
        with self._lock:
            if self._tokens is None:
                self._tokens = _Tokens(self._vocabulary, self._vocab_size)
            return self._tokens

    def _compile(self, field: str, text: str, outputs: StructuredOutputs) -> "_State":
        llguidance = _llguidance()
        name = outputs.field or field
        check_cost(field, text, name)
        tokens = self._vocabulary_tokens()
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(tokens)
        if outputs.structural_tag is not None:
            grammar, schemas = structural_tag_lark(text, name, tokens.control_tokens)
            outputs = replace(outputs, tool_schemas=schemas)
        else:
            grammar = _grammar(llguidance, outputs, name)
        matcher, message = self._matcher(llguidance, _enclosed(grammar, outputs.envelope))
        if matcher is None:
            if outputs.envelope:  # which the user has not written
                _, message = self._matcher(llguidance, grammar)
            raise RequestError(self._reason(llguidance, outputs, name, message))
        state = _State(matcher, tokens)
        mask = np.zeros(mask_words(self._vocab_size), np.uint32)
        with suppress(ConstraintError):  # the mask stays empty
            state.fill(mask)
        if not mask.any():
            raise RequestError(f"{name} allows no text that the tokenizer can write; change it")
        return state

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
        if outputs.structural_tag is not None:
            return f"{name} cannot be compiled; use fewer or simpler tags"
        if outputs.tool_schemas:
            return f"{name} cannot be compiled together; send fewer tools, or simpler parameters"
        if not message:
            return f"{name} cannot be compiled with the reasoning and the tools; simplify it"
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
    __slots__ = ("_matcher", "_num_bytes", "_start", "_tokens", "_vocabulary")

    def __init__(self, matcher: "LLMatcher", vocabulary: "_Tokens") -> None:
        """Begin at the start of a text; only clones may move."""
        self._start = self._matcher = matcher
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._num_bytes = 0  # of the text

    place = None

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def num_bytes(self) -> int:
        return _STATE_BYTES + _STATE_BYTES_PER_BYTE * self._num_bytes

    def advance(self, token: int) -> None:
        self._tokens.append(token)
        self._num_bytes += len(self._vocabulary.tokens[token])
        if not self._matcher.consume_token(token):
            raise self._error()

    def rollback(self, num_tokens: int) -> None:
        kept = len(self._tokens) - num_tokens
        self._num_bytes -= sum(len(self._vocabulary.tokens[token]) for token in self._tokens[kept:])
        del self._tokens[kept:]
        if not self._matcher.is_error():
            self._matcher.rollback(num_tokens)
        if self._matcher.is_error():  # a matcher cannot leave an error
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._tokens)

    def fill(self, mask: Mask) -> None:
        end = self._vocabulary.eos_token_id
        bits = np.empty(mask_words(end + 1), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise self._error()
        word, bit = divmod(end, 32)
        bits[word] &= ~np.uint32(1 << bit)  # the token of the text's end
        mask[:] = bits[: len(mask)]

    def clone(self) -> Self:
        clone = copy(self)
        clone._matcher = self._matcher.deep_copy()
        clone._tokens = self._tokens[:]
        return clone

    def _error(self) -> ConstraintError:
        reason = _shortened(self._matcher.get_error())
        return ConstraintError(f"the grammar cannot continue: {reason}")


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

    @property
    def control_tokens(self) -> dict[str, int]:
        """Ids of control tokens by their texts."""
        texts = {
            self.tokens[token].decode(errors="replace"): token
            for token in self.special_token_ids
            if token != self.eos_token_id
        }
        return {text: token for text, token in texts.items() if text}

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text; llguidance may pass a long text, whose end is left out."""
        return self._cached_encode(text[:_MAX_FORCED_CHARACTERS])

    def encode(self, text: str) -> list[int]:
        """The tokens of exactly this text. Raises RequestError."""
        ids = self._encode(text)
        if b"".join([self.tokens[token] for token in ids]) != text.encode():
            raise RequestError(
                f"the tokenizer cannot write {reprlib.repr(text)}; change the text, or give token "
                "ids"
            )
        return ids

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
        return "choice", json.dumps(outputs.choice), outputs.envelope
    return next(
        (name, str(text), outputs.envelope)
        for name in ("json", "regex", "grammar", "structural_tag", "json_object")
        if (text := getattr(outputs, name))
    )


def _grammar(llguidance: ModuleType, outputs: StructuredOutputs, name: str) -> str:
    matcher: type[LLMatcher] = llguidance.LLMatcher
    if outputs.regex is not None:
        return matcher.grammar_from_regex(with_ascii_classes(outputs.regex))
    if outputs.grammar is not None:
        return matcher.grammar_from_lark(_lark(outputs.grammar, name))
    if outputs.choice is not None:
        choices = [json.dumps(text, ensure_ascii=False) for text in outputs.choice]
        return matcher.grammar_from_lark("start: " + " | ".join(choices))
    schema = '{"type": "object"}' if outputs.json is None else str(outputs.json)
    return matcher.grammar_from_json_schema(schema, defaults=_JSON)


def _enclosed(grammar: str, envelope: str) -> str:
    """The grammar of the whole output, of which `grammar` matches a part."""
    if not envelope:
        return grammar
    is_list = grammar.lstrip().startswith("{")
    grammars = json.loads(grammar)["grammars"] if is_list else [{"lark_grammar": grammar}]
    answer = {**grammars[0], "name": "answer"}
    return json.dumps({"grammars": [{"lark_grammar": envelope}, answer, *grammars[1:]]})


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
