"""Exact conversion of text to token ids and back."""

import codecs
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models

from headrace.checkpoint.end_tokens import end_names
from headrace.errors import FormatError, HeadraceError, RequestError
from headrace.record import frozen


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character of each byte (Radford et al. 2019), character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
BYTE_CHARACTERS = frozenset(_BYTE_OF)
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@contextmanager
def library_calls(subject: str, error: type[HeadraceError] = FormatError) -> Iterator[None]:
    """Convert the tokenizer library's errors to `error`.

    It raises plain `Exception`, and a Rust panic is a `BaseException`.
    """
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as failure:
        is_expected = type(failure) is Exception or isinstance(
            failure, TypeError | ValueError | LookupError | OverflowError
        )
        if not is_expected and type(failure).__name__ != "PanicException":
            raise
        reason = str(failure).strip().partition("\n")[0] or type(failure).__name__
        raise error(f"{subject}: {reason[:300]}") from failure


@frozen
class Vocabulary:
    byte_level: bool
    """GPT-2's byte alphabet, otherwise U+2581 for a space."""
    strip_space: bool = False
    """Encoding adds a space before the text, decoding removes it."""
    word_part: str | None = None
    """Mark of tokens that continue a word (WordPiece); all others begin with a space."""
    bos_id: int | None = None
    eos_id: int | None = None
    end_ids: frozenset[int] = frozenset()
    """End tokens that the files of the model name by id."""
    has_end_list: bool = False
    """Whether `end_ids` is complete, so that names of tokens add no ends."""


class Segment(NamedTuple):
    """A part of a text."""

    text: str
    parse_special: bool
    """Whether control tokens in the part become tokens, or stay text."""


class Tokenizer:
    """A thread-safe tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: Vocabulary, where: str) -> None:
        """`where` names the file in messages. Raises FormatError."""
        with library_calls(where):
            self._parsing = backend
            self._plain = _without_special_parsing(backend)
            self._added = backend.get_added_tokens_decoder()
            backend.encode("", add_special_tokens=True)
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}
        """Texts of tokens of whole characters, as detokenisers find them."""
        self.vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.special_ids = frozenset(
            token_id for token_id, token in self._added.items() if token.special
        )
        eos = set() if self.eos_id is None else {self.eos_id}
        self.eos_ids = vocabulary.end_ids | self._ends_by_name() | eos

    @cached_property
    def vocab_size(self) -> int:
        with library_calls("the tokenizer"):
            return self._parsing.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        with library_calls("the tokenizer"):
            backend = tokenizers.Tokenizer.from_str(self._parsing.to_str())
            if self.vocabulary.byte_level:
                backend.decoder = decoders.ByteLevel()
            elif self.vocabulary.word_part is None:
                steps: list[decoders.Decoder] = [
                    decoders.Replace("\u2581", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                ]
                backend.decoder = decoders.Sequence(
                    [*steps, decoders.Strip(" ", 1, 0)] if self.vocabulary.strip_space else steps
                )
            text: str = backend.to_str(pretty=True)
            return text

    @property
    def bos_token(self) -> str:
        return self._content(self.bos_id)

    @property
    def eos_token(self) -> str:
        return self._content(self.eos_id)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Token ids that `encode` adds before a text, usually BOS or nothing."""
        with library_calls("the tokenizer"):
            # The vocabulary may lack any text, so the text is a token of another tokenizer.
            text = tokenizers.Tokenizer(models.WordLevel({"a": 0})).encode("a")
            encoding = self._plain.post_process(text, add_special_tokens=True)
        return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Encode `text`; `add_special` adds tokens around a prompt, usually BOS.

        `parse_special` makes control tokens of their names in the text, as transformers does.
        Without it they stay text: use that for text which may be hostile. Raises RequestError
        for lone surrogates, and for no tokens.
        """
        return self._encode(self._parsing if parse_special else self._plain, text, add_special)

    def encode_segments(
        self, segments: Iterable[tuple[str, bool]], add_special: bool = False
    ) -> list[int]:
        """Encode a text whose parts differ in `parse_special`; see `Segment`.

        The text is split into tokens as a whole. A control token must lie in adjacent segments
        that parse control tokens. Raises as `encode`.
        """
        marking, parts = self._marking, []
        for parse_special, group in groupby(segments, key=lambda segment: bool(segment[1])):
            text = "".join([text for text, _ in group])
            parts.append(marking.mark(text) if parse_special else text)
        ids = self._encode(marking.backend, "".join(parts), add_special)
        return [marking.real_ids.get(token_id, token_id) for token_id in ids]

    def control_tokens(
        self, text: str, is_text: Callable[[int, int], bool]
    ) -> tuple[list[tuple[int, int]], bool]:
        """Find control tokens from left to right, and return their start and end.

        `is_text` gets start and end of a name, and says whether the name is text. The second
        result is whether any name is text.
        """
        spans, has_text, start = [], False, 0
        while match := self._marking.names.search(text, start):
            start = match.end()
            if match[0] not in self._marking.special:
                continue
            if is_text(*match.span()):
                has_text, start = True, match.start() + 1
            else:
                spans.append(match.span())
        return spans, has_text

    @cached_property
    def _marking(self) -> "_Marking":
        with library_calls("the tokenizer"):
            return _Marking(self._parsing)

    def _ends_by_name(self) -> frozenset[int]:
        if self.vocabulary.has_end_list:
            return frozenset()
        added = {token.content: token_id for token_id, token in self._added.items()}
        control = {self._added[token_id].content for token_id in self.special_ids}
        return frozenset(added[name] for name in end_names(control, added.keys()))

    def _encode(self, backend: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
        with library_calls("the tokenizer cannot encode this text", RequestError):
            try:
                return backend.encode(text, add_special_tokens=add_special).ids
            except TypeError as error:
                raise RequestError(
                    "the text is not valid Unicode: it has lone surrogates; "
                    "remove them, or decode its bytes as UTF-8 first"
                ) from error

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode; invalid UTF-8 becomes U+FFFD."""
        decoder = self.decoder(skip_special)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def decoder(self, skip_special: bool = True, continues: bool = False) -> "Detokeniser":
        """Make a detokeniser; `continues` keeps a leading space."""
        return Detokeniser(
            self, skip_special, strip_space=self.vocabulary.strip_space and not continues
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, perhaps a part of a character; empty for an unknown id."""
        spelt = self._bytes.get(token_id)
        if spelt is None:
            spelt = self._bytes[token_id] = self._spell(token_id)
        return spelt

    def has_control_token(self, text: str) -> bool:
        """Whether the text contains the name of a control token."""
        return bool(self._control_names.search(text))

    @cached_property
    def _control_names(self) -> re.Pattern[str]:
        return _any_of(self._added[token_id].content for token_id in self.special_ids)

    def _content(self, token_id: int | None) -> str:
        if token_id is None or not 0 <= token_id < 2**32:
            return ""
        with library_calls("the tokenizer"):
            return self._parsing.id_to_token(token_id) or ""

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._content(token_id)
        if self.vocabulary.byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:
                return token.encode()
        if (mark := self.vocabulary.word_part) is not None:
            is_part = token.startswith(mark)
            return token.removeprefix(mark).encode() if is_part else f" {token}".encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace("\u2581", " ").encode()


class Detokeniser:
    """Text of a growing sequence. All results of `push` and `flush` together equal `decode`."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, strip_space: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._strip_space = strip_space
        self._utf8 = _utf8_decoder()
        self._is_inside_character = False

    def clone(self) -> "Detokeniser":
        clone = copy(self)
        clone._utf8 = _utf8_decoder()
        clone._utf8.setstate(self._utf8.getstate())
        return clone

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not (self._is_inside_character or self._strip_space):
            text = self._tokenizer.whole_texts.get(token_id)
            if text is not None:
                return text
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        is_whole = not (self._is_inside_character or self._strip_space)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        text = self._utf8.decode(data)
        self._is_inside_character = bool(self._utf8.getstate()[0])
        if is_whole and not self._is_inside_character:
            self._tokenizer.whole_texts[token_id] = text
        return text

    def flush(self) -> str:
        """U+FFFD for an incomplete character, otherwise empty."""
        return self._utf8.decode(b"", final=True)


class _Marking:
    """A tokenizer that reads a control token only after a marker, which no text can know."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._marker = os.urandom(16).hex()
        self.special = {token.content for token in added.values() if token.special}
        self.names = _any_of(token.content for token in added.values())

        self.backend = _without_special_parsing(backend)
        self.real_ids: dict[int, int] = {}
        for token_id, token in added.items():
            if token.special and token.content:
                content = self._marker + token.content
                # The strips of a token belong to it; its normalisation would change the marker.
                marked = tokenizers.AddedToken(
                    content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
                self.backend.add_tokens([marked])
                marked_id = self.backend.token_to_id(content)
                assert marked_id is not None
                self.real_ids[marked_id] = token_id

    def mark(self, text: str) -> str:
        """Put the marker before each control token of a text."""
        return self.names.sub(self._marked, text)

    def _marked(self, match: re.Match[str]) -> str:
        return self._marker + match[0] if match[0] in self.special else match[0]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match any of the texts, of two at one place the longer."""
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _without_special_parsing(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    plain = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if getattr(backend, part) is not None:
            setattr(plain, part, getattr(backend, part))
    plain.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    plain.encode_special_tokens = True
    return plain
