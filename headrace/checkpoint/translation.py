"""Texts in the tokens of two vocabularies, for a draft model with another tokenizer.

A draft model reads a sequence in tokens of its own, and what it drafts is cut into tokens of the
target again (universal assisted generation, Timor et al. 2025). Bytes are the common language:
tokens may split a character, and end or begin inside a token of the other vocabulary. A wrong
translation costs acceptance and never a token, because the target verifies drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from headrace.batch import Ints
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import RequestError

LOOKBEHIND = 24
"""Last tokens of a text that further tokens may change."""
_KEPT_OPEN = 4
"""Last tokens that are always cut again; more, if the first of them does not begin a word."""
_CONTEXT_BYTES = 64
"""Bytes before a text that decide how its first word is cut."""


class Piece(NamedTuple):
    token: int
    end: int
    """Bytes of the text up to the end of the token."""


class Translator:
    """Translates between the `target` and the `draft` vocabulary.

    `target_size` and `draft_size` are the numbers of rows of the models' embeddings: a tokenizer
    may have more tokens than its model.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int
    ) -> None:
        self.target = Cutter(target, target_size)
        self.draft = Cutter(draft, draft_size)
        names = {draft.token_bytes(own): own for own in draft.special_ids if own < draft_size}
        ends = [end for end in (draft.eos_id, *sorted(draft.eos_ids)) if end is not None]
        same_name = {
            token: names[spelt]
            for token in sorted(target.special_ids)
            if token < target_size and (spelt := target.token_bytes(token)) in names
        }
        same_role = {
            token: ends[0]
            for token in (target.eos_id, *sorted(target.eos_ids))
            if token is not None and token < target_size and ends and ends[0] < draft_size
        }
        self.control = same_role | same_name
        """The draft's control token for a control token of the target, by its name or as an end."""
        self.drafted_control: dict[int, int] = {}
        """The target's control token for one of the draft."""
        for token, own in [*same_name.items(), *same_role.items()]:
            self.drafted_control.setdefault(own, token)

    def new_text(self) -> "DraftText":
        """A text without tokens."""
        return DraftText(self)

    def shared_tokens(self) -> Ints:
        """The target's token with the bytes of each token of the draft, or -1: [draft_size]."""
        tokens = np.full(self.draft.size, -1, np.int32)
        for spelt, own in self.draft.ids.items():
            tokens[own] = self.target.ids.get(spelt, -1)
        for own, token in self.drafted_control.items():
            tokens[own] = token
        return tokens


class Cutter:
    """Cuts bytes into tokens of one vocabulary, with ids below `size`."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.prefix = [token for token in tokenizer.prefix_ids if token < size]
        self.adds_space = tokenizer.vocabulary.strip_space
        self.ids: dict[bytes, int] = {}
        """The token of bytes that are text. SentencePiece spells some bytes twice, and reads the
        later token.
        """
        for token in range(min(size, tokenizer.vocab_size)):
            if token not in tokenizer.special_ids and (spelt := self.spelt(token)):
                self.ids[spelt] = token
        self._longest = max(map(len, self.ids), default=0)

    def spelt(self, token: int) -> bytes:
        """The bytes of a token, or none."""
        return self.tokenizer.token_bytes(token)

    def cut(self, before: bytes, data: bytes, *, begins: bool = False) -> list[Piece]:
        """Cut `data`, which follows `before`, or `begins` a text.

        Bytes that no token spells are left out. The first token of a text may begin with a space
        that its tokenizer adds.
        """
        pieces: list[Piece] = []
        start = 0
        while start < len(data):
            try:
                text, end, after = data[start:].decode(), len(data), len(data)
            except UnicodeDecodeError as error:
                end, after = start + error.start, start + error.end
                text = data[start:end].decode()
            if text:
                pieces += self._cut_text(before + data[:start], text, start, begins and not start)
            pieces += self._match(data, end, after)
            start = after
        return pieces

    def _cut_text(self, before: bytes, text: str, start: int, begins: bool) -> list[Piece]:
        context = _context(before)
        data, skipped = text.encode(), len(context.encode())
        tokens = self._encoded(context + text)
        spelt = b"".join(self.spelt(token) for token in tokens)
        added = len(spelt) - skipped - len(data)
        if spelt.removeprefix(b" " * added) != context.encode() + data or added not in (0, 1):
            return [Piece(t, start + end) for t, end in self._match(data, 0, len(data))]

        pieces: list[Piece] = []
        end = -skipped - added
        for token in tokens:
            first, end = end, end + len(self.spelt(token))
            if (first < 0 and not begins) or token >= self.size:
                # A token that begins in the context, or that the model does not have.
                matched = self._match(data, max(first, 0), end)
                pieces += [Piece(t, start + stop) for t, stop in matched]
            else:
                pieces.append(Piece(token, start + end))
        return pieces

    def _encoded(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special=False, parse_special=False)
        except RequestError:  # it has no token for a character
            return []

    def _match(self, data: bytes, start: int, end: int) -> list[Piece]:
        """Cut bytes without rules of the tokenizer, longest tokens first."""
        pieces: list[Piece] = []
        while start < end:
            for stop in range(min(end, start + self._longest), start, -1):
                token = self.ids.get(data[start:stop])
                if token is not None:
                    pieces.append(Piece(token, stop))
                    start = stop
                    break
            else:
                start += 1
        return pieces


def _context(before: bytes) -> str:
    """The text at the end of `before`, from a space on if there is one; empty if its end is no
    text.
    """
    tail = before[-_CONTEXT_BYTES:]
    while tail and tail[0] & 0xC0 == 0x80:
        tail = tail[1:]
    try:
        text = tail.decode()
    except UnicodeDecodeError as error:
        try:
            text = tail[error.end :].decode()
        except UnicodeDecodeError:
            return ""
    space = text.find(" ")
    return text[space:] if 0 <= space < len(text) // 2 else text


class DraftText:
    """A sequence of the target in tokens of the draft, which grows with the sequence.

    Only the last `LOOKBEHIND` tokens of `ids` may change when it grows.
    """

    def __init__(self, translator: Translator) -> None:
        self.ids: list[int] = list(translator.draft.prefix)
        self.num_read = 0
        """Tokens of the target that it has read."""
        self._translator = translator
        self._data = bytearray()
        """Bytes since the last control token."""
        self._begins = True
        """Whether the next byte is the first since then. A space that a tokenizer adds is none of
        `_data`.
        """
        self._first = len(self.ids)
        """Index in `ids` of their first token."""
        self._ends: list[int] = []
        """Bytes up to the end of each of their tokens."""

    def clone(self) -> Self:
        """Return an independent text with the same tokens."""
        other = type(self)(self._translator)
        other.ids, other._data, other._ends = self.ids[:], self._data[:], self._ends[:]
        other.num_read, other._first, other._begins = self.num_read, self._first, self._begins
        return other

    def read(self, known: Sequence[int]) -> None:
        """Read the tokens of the target that follow those already read."""
        target = self._translator.target
        special, grown = target.tokenizer.special_ids, bytearray()
        for token in known[self.num_read :]:
            if token not in special:
                grown += target.spelt(token)
                continue
            self._append(bytes(grown))
            grown.clear()
            self._append_control(token)
        self._append(bytes(grown))
        self.num_read = len(known)

    @property
    def is_whole(self) -> bool:
        """Whether the tokens spell the text up to its end."""
        return not self._data or (bool(self._ends) and self._ends[-1] == len(self._data))

    def translated(self, drafted: Sequence[int]) -> list[int]:
        """Cut drafted tokens into tokens of the target, up to the first without a counterpart."""
        translator, spelt = self._translator, bytearray()
        last: int | None = None
        for own in drafted:
            if own in translator.draft.tokenizer.special_ids:
                last = translator.drafted_control.get(own)
                break
            piece = translator.draft.spelt(own)
            if not piece:
                break
            spelt += piece
        data = bytes(spelt)
        if not self._data and translator.draft.adds_space:
            data = data.removeprefix(b" ")
        if last is None:
            data = data[: _whole_characters(data)] or data

        tokens: list[int] = []
        start = 0
        before = bytes(self._data[-2 * _CONTEXT_BYTES :])
        for token, end in translator.target.cut(before, data, begins=self._begins):
            if end - len(translator.target.spelt(token)) > start:
                return tokens  # no token spells the bytes before it
            tokens.append(token)
            start = end
        return tokens if last is None or start < len(data) else [*tokens, last]

    def _append_control(self, token: int) -> None:
        own = self._translator.control.get(token)
        is_first = len(self.ids) == len(self._translator.draft.prefix) and not self._data
        if own is not None and not (is_first and [own] == self.ids):
            self.ids.append(own)
        self._data.clear()
        self._begins = True
        self._ends.clear()
        self._first = len(self.ids)

    def _append(self, grown: bytes) -> None:
        """Add bytes, and cut the last tokens again with them."""
        if not grown:
            return
        if self._begins and self._translator.target.adds_space:
            grown = grown.removeprefix(b" ")
        self._begins = False
        if not grown:
            return
        draft, kept = self._translator.draft, self._num_kept()
        start = self._ends[kept - 1] if kept else 0
        self._data += grown
        before = bytes(self._data[max(0, start - 2 * _CONTEXT_BYTES) : start])
        pieces = draft.cut(before, bytes(self._data[start:]), begins=not kept)
        del self._ends[kept:], self.ids[self._first + kept :]
        self._ends += [start + piece.end for piece in pieces]
        self.ids += [piece.token for piece in pieces]

    def _num_kept(self) -> int:
        """Tokens since the last control token that stay: the next begins a word, if one does."""
        ends, spelt = self._ends, self._translator.draft.spelt
        latest = max(0, len(ends) - _KEPT_OPEN)
        for kept in range(latest, max(0, len(ends) - LOOKBEHIND), -1):
            word = spelt(self.ids[self._first + kept])
            if word[:1].isspace() and word.strip() and kept:
                return kept
        return 0 if len(ends) <= LOOKBEHIND else latest


def _whole_characters(data: bytes) -> int:
    """The number of bytes without an incomplete character at the end."""
    for length in range(1, min(4, len(data)) + 1):
        byte = data[-length]
        if byte & 0xC0 != 0x80:
            needed = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return len(data) - length if needed > length else len(data)
    return len(data)
