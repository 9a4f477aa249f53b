import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.outputs import Logprob, Logprobs

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


class LogprobWriter:
    """Writes log-probabilities in the shapes of the APIs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_top: int,
        *,
        as_ids: bool = False,
        named: Sequence[int] | None = None,
    ) -> None:
        """`as_ids` names tokens `token_id:N`, as vLLM does for `return_tokens_as_token_ids`.

        The output token and `named` tokens are written in place of the `num_top` likeliest.
        """
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        self._named = named

    def chat(self, entries: Iterable[Logprobs]) -> list[dict[str, Any]]:
        """Entries of chat completions and of the Responses API."""
        content = []
        for entry in entries:
            token_id, sampled = next(iter(entry.items()))
            top = self._top_of(entry, self._num_top)
            content.append(
                self._chat_token(token_id, sampled)
                | {"top_logprobs": [self._chat_token(other, score) for other, score in top]}
            )
        return content

    def _chat_token(self, token_id: int, score: Logprob) -> dict[str, Any]:
        return {
            "token": self._name(token_id, score.decoded_token),
            "logprob": _json_number(score.logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def completion(
        self, entries: Sequence[Logprobs | None], token_ids: Sequence[int], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Lists by token. The first token of a prompt has None for its scores."""
        result: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": list(offsets),
        }
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
            result["tokens"].append(self._name(token_id, text))
            logprob = _json_number(entry[token_id].logprob) if entry else None
            result["token_logprobs"].append(logprob)
            result["top_logprobs"].append(self._top(entry) if entry else None)
        return result

    def _top(self, entry: Logprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, score in self._top_of(entry, max(self._num_top, 1)):
            # Several tokens may have one text, such as parts of characters; the likeliest counts.
            found.setdefault(self._name(token_id, score.decoded_token), _json_number(score.logprob))
        return found

    def _top_of(self, entry: Logprobs, num_top: int) -> list[tuple[int, Logprob]]:
        # Entries of prompt tokens have no named tokens.
        if self._named and all(token in entry for token in self._named):
            return list(entry.items())  # the output token comes first
        return sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_ids else text


def prompt_logprobs(entries: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
    """Write scores of a prompt's tokens in vLLM's shape: by token id, None for the first token."""
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: Logprobs) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": _json_number(score.logprob),
            "rank": score.rank,
            "decoded_token": score.decoded_token,
        }
        for token_id, score in entry.items()
    }


class TextOffsets:
    """Counts the characters of a text before each of its tokens.

    A token that begins inside of a character counts from the character's beginning.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int, skips_special: bool) -> None:
        """`begin` counts the characters before the first token."""
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = begin

    def of_prompt(self, token_ids: Iterable[int], text: str) -> list[int]:
        """Find the tokens of a prompt. Its text may lack added control tokens and a first space."""
        found = []
        for token_id in token_ids:
            piece = self._piece(token_id)
            found.append(self._position)
            is_there = text.startswith(piece, self._position)
            if is_there or token_id not in self._tokenizer.special_ids:
                self._position += len(piece) - (not is_there and piece.startswith(" "))
        return found

    def of_output(self, token_ids: Iterable[int]) -> list[int]:
        """Find the next tokens of an output."""
        found = []
        for token_id in token_ids:
            if self._skips_special and token_id in self._tokenizer.special_ids:
                found.append(self._position)
                continue
            piece = self._piece(token_id)
            found.append(self._position)
            self._position += len(piece)
        return found

    def _piece(self, token_id: int) -> str:
        """The characters that a token completes.

        If it begins a character, an incomplete character before it counts as U+FFFD.
        """
        data = self._tokenizer.token_bytes(token_id)
        if data and data[0] & 0xC0 != 0x80:
            self._position += len(self._decoder.decode(b"", final=True))
            self._decoder.reset()
        return self._decoder.decode(data)


def _json_number(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
