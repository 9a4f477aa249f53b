"""The output of a sequence."""

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import Protocol, Self

import numpy as np

from headrace.batch import TokenLogprobs
from headrace.constraint import Constraint
from headrace.engine.stops import AnswerFinder, StopFinder, StopPattern
from headrace.outputs import CompletionOutput, FinishReason, Logprob, Logprobs
from headrace.sampling_params import SamplingParams


class TextDecoder(Protocol):
    """Decodes a growing list of tokens into complete characters."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def clone(self) -> Self: ...


class TokenizerView(Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def eos_ids(self) -> Collection[int]: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def decoder(self, skip_special: bool, continues: bool) -> TextDecoder:
        """Return a decoder; `continues` if other text precedes the tokens."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def has_control_token(self, text: str) -> bool: ...

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...


class Output:
    """The text, tokens, stop conditions and finish reason of one sequence."""

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: TokenizerView,
        patterns: Iterable[StopPattern],
        max_tokens: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = None if params.logprobs is None else 0.0
        self.constraint = constraint and constraint.clone()
        self.end_ids = end_ids(params, tokenizer)
        """Tokens that end the output after `min_tokens`."""
        self._params = params
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._decoder = tokenizer.decoder(params.skip_special_tokens, continues=True)
        self._finder = StopFinder(patterns)
        self._has_stops = self._finder.has_patterns
        self._answer: AnswerFinder | None = None
        """Set if stop strings hold only in the answer."""
        if params.stop and params.stop_after:
            self._answer = AnswerFinder(params.stop_after)

        self._decodes_late = params.beam_width is not None and not self._has_stops
        """Whether the end decodes all tokens: few of the beams of a search reach its result."""

        # `take` splits the text into pieces that were taken, and new text after them.
        self._taken: list[str] = []
        self._new = ""
        self._num_taken = 0  # tokens
        self._num_resumed = 0  # tokens without log-probabilities, from before a resume
        self._num_hidden = 0
        """Last tokens that the text leaves out: 1 after an end token."""
        self._end_taken = False

    def clone(self) -> "Output":
        clone = copy(self)
        clone.token_ids = self.token_ids[:]
        clone.logprobs = self.logprobs[:]
        clone._taken = self._taken[:]
        if not self._decodes_late:  # else the decoder is at its start
            clone._decoder = self._decoder.clone()
            clone._finder = self._finder.clone()
            clone._answer = copy(self._answer)
        clone.constraint = self.constraint and self.constraint.clone()
        return clone

    @property
    def num_left(self) -> int:
        """Tokens until the max length."""
        return self._max_tokens - len(self.token_ids)

    @property
    def text(self) -> str:
        """The full text, including an end that may become a stop string."""
        return "".join(self._taken) + self._new

    def push(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a token, and apply the stop conditions.

        Raises ConstraintError if the grammar allows no token after it.
        """
        if logprobs is not None:
            named = self._params.logprob_token_ids
            self.logprobs.append(describe(self._tokenizer, token, logprobs, named))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs.logprob
        self.token_ids.append(token)

        can_stop = len(self.token_ids) > self._params.min_tokens
        if can_stop and token in self.end_ids:
            if not self._params.include_stop_str_in_output:
                self._num_hidden = 1
            elif not self._decodes_late:
                self._new += self._decoder.push(token)
            self.finish("stop", token if token in (self._params.stop_token_ids or ()) else None)
            return

        if self.constraint is not None:
            self.constraint.push(token)
        if self._decodes_late:
            pass
        elif not self._has_stops:
            self._new += self._decoder.push(token)
        elif stop := self._append_token(token, can_stop):
            self.finish_reason, self.stop_reason = "stop", stop
            return
        if self.constraint is not None and self.constraint.must_end:
            self.finish("stop")
        elif len(self.token_ids) == self._max_tokens:
            self.finish("length")

    def resume(self, token_ids: Iterable[int]) -> None:
        """Append tokens that another engine has reported, without log-probabilities."""
        for token in token_ids:
            if self.finish_reason:
                break
            self.push(token, None)
        self.take()
        self._num_resumed = self._num_taken

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the output, and flush an incomplete character."""
        if self._answer:
            self._new += self._answer.flush()
        if self._decodes_late:
            self._decoder = self._decoder.clone()
            shown = self.token_ids[: len(self.token_ids) - self._num_hidden]
            self._new = "".join(map(self._decoder.push, shown))
        self._new += self._decoder.flush()
        self.finish_reason, self.stop_reason = reason, stop_reason

    def fail(self, message: str) -> None:
        """End the output without the decoder, whose error it may be."""
        self.finish_reason, self.stop_reason = "error", message

    @property
    def has_new(self) -> bool:
        if self._num_taken < len(self.token_ids):
            return True
        return self.finish_reason is not None and not self._end_taken

    def take(self) -> tuple[str, list[int], list[Logprobs]]:
        text, self._new = self._new, ""
        if self._has_stops and not self.finish_reason:
            end = len(text) - self._finder.num_held
            text, self._new = text[:end], text[end:]
        self._taken.append(text)

        first, self._num_taken = self._num_taken, len(self.token_ids)
        self._end_taken = self.finish_reason is not None
        logprobs = []
        if self.logprobs:
            logprobs = self.logprobs[max(0, first - self._num_resumed) :]
        return text, self.token_ids[first:], logprobs

    def completion(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=None if self._params.logprobs is None else self.logprobs,
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _append_token(self, token: int, can_stop: bool) -> str | None:
        """Append the text of a token, and return the stop string that it completes."""
        is_hidden = self._finder.sees_hidden and token in self._tokenizer.special_ids
        piece = _text(self._tokenizer, token) if is_hidden else self._decoder.push(token)
        if self._answer:
            if is_hidden and not self._answer.has_begun:
                return None
            before, piece = ("", piece) if is_hidden else self._answer.push(piece)
            self._new += before
        stop = self._finder.push(piece, can_stop, is_hidden)
        if stop is None:
            self._new += "" if is_hidden else piece
            return None
        self._new += "" if is_hidden else piece[: stop.end]
        # `take` held the match back, so all that is visible of it is still in the new text.
        self._new = self._new[: len(self._new) - stop.num_visible]
        if self._params.include_stop_str_in_output:
            self._new += stop.text
        return stop.text


def stop_patterns(params: SamplingParams, tokenizer: TokenizerView) -> list[StopPattern]:
    """Return the patterns of the stop strings. Those with a control token see control tokens."""
    skips = params.skip_special_tokens
    return [
        StopPattern(stop, sees_hidden=skips and tokenizer.has_control_token(stop))
        for stop in params.stop or ()
    ]


def end_ids(params: SamplingParams, tokenizer: TokenizerView) -> frozenset[int]:
    eos_ids = () if params.ignore_eos else tokenizer.eos_ids
    return frozenset(params.stop_token_ids or ()) | frozenset(eos_ids)


def describe(
    tokenizer: TokenizerView,
    token: int,
    logprobs: TokenLogprobs,
    named: Sequence[int] | None = None,
) -> Logprobs:
    """Return the log-probabilities of a token and of the top tokens, by token id.

    `named` keeps these of the top tokens only.
    """
    described = {token: Logprob(logprobs.logprob, logprobs.rank, _text(tokenizer, token))}
    places: Iterable[int] = range(len(logprobs.top_ids))
    if named is not None:
        places = _places(logprobs.top_ids, named)
    for place in places:
        top = logprobs.top_ids[place]
        described[top] = Logprob(logprobs.top_logprobs[place], place + 1, _text(tokenizer, top))
    return described


def _places(ids: Sequence[int], named: Sequence[int]) -> list[int]:
    """Where the named ids stand in `ids`, which has each id at most once."""
    found = np.flatnonzero(np.isin(np.asarray(ids), np.asarray(named)))
    place_of = {ids[place]: place for place in found.tolist()}
    return [place_of[token] for token in named if token in place_of]


def _text(tokenizer: TokenizerView, token: int) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")
