"""The output of a sequence, from its drawn tokens: text, stop conditions, log-probabilities and the
finish reason.
"""

from collections.abc import Collection, Iterable
from copy import copy
from typing import Protocol, Self

from headrace.batch import TokenLogprobs
from headrace.constraint import Constraint
from headrace.engine.stops import StopFinder, StopPattern
from headrace.outputs import CompletionOutput, FinishReason, Logprob, Logprobs
from headrace.sampling_params import SamplingParams


class TextDecoder(Protocol):
    """Decodes a growing sequence of tokens; gives complete characters only."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...
    def clone(self) -> Self: ...


class TokenizerView(Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def eos_ids(self) -> Collection[int]: ...
    def decoder(
        self, skip_special: bool, continues: bool
    ) -> TextDecoder: ...  # continues: text precedes the tokens
    def token_bytes(self, token_id: int) -> bytes: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    def encode(self, text: str, add_special: bool) -> list[int]: ...


class Output:
    """The growing output of one sequence. It ends with a stop token, a stop string, a text that is
    complete or at `max_tokens`.
    """

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
        self.constraint = constraint
        """What may follow; None: anything."""
        self._params = params
        self._tokenizer = tokenizer
        self.end_ids = end_ids(params, tokenizer)
        """Tokens that end the output once it has more than `min_tokens`."""
        self._max_tokens = max_tokens
        self._decoder = tokenizer.decoder(params.skip_special_tokens, continues=True)
        self._finder = StopFinder(patterns)
        self._taken: list[str] = []  # text that `take` has returned
        self._fresh = ""  # text after it
        self._num_taken = 0  # tokens that `take` has returned
        self._num_resumed = 0  # tokens that were there before it began
        self._end_taken = False

    def clone(self) -> "Output":
        """An independent output that continues this one."""
        clone = copy(self)
        clone.token_ids, clone.logprobs, clone._taken = (
            self.token_ids[:],
            self.logprobs[:],
            self._taken[:],
        )
        clone._decoder, clone._finder = self._decoder.clone(), self._finder.clone()
        return clone

    @property
    def text(self) -> str:
        """The full text, with an end that may yet become a stop string."""
        return "".join(self._taken) + self._fresh

    def push(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token, and end the output where a stop condition is met. Raises ConstraintError
        where no other token can follow.
        """
        if logprobs is not None:
            self.logprobs.append(describe(self._tokenizer, token, logprobs))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprobs.logprob
        self.token_ids.append(token)
        armed = len(self.token_ids) > self._params.min_tokens
        if armed and token in self.end_ids:
            if self._params.include_stop_str_in_output:
                self._fresh += self._decoder.push(token)
            self.finish("stop", token if token in (self._params.stop_token_ids or ()) else None)
            return
        if self.constraint is not None:
            self.constraint = self.constraint.after(token)
        if stop := self._add_text(self._decoder.push(token), armed):
            self.finish_reason, self.stop_reason = "stop", stop
        elif self.constraint is not None and self.constraint.must_end:
            self.finish("stop")
        elif len(self.token_ids) == self._max_tokens:
            self.finish("length")

    def resume(self, token_ids: Iterable[int]) -> None:
        """Go on behind tokens of which another output like this one has told all there was to tell,
        up to one that ends it.

        There are no log-probabilities of them. Raises as `push` does.
        """
        for token in token_ids:
            if self.finish_reason:
                break
            self.push(token, None)
        self.take()
        self._num_resumed = self._num_taken

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the output, with the incomplete character at its end if there is one."""
        self._fresh += self._decoder.flush()
        self.finish_reason, self.stop_reason = reason, stop_reason

    def fail(self, message: str) -> None:
        """End the output as it is, by an error, which may be the tokenizer's own."""
        self.finish_reason, self.stop_reason = "error", message

    @property
    def has_news(self) -> bool:
        """Whether `take` would return new tokens or the end of the output."""
        return self._num_taken < len(self.token_ids) or (
            self.finish_reason is not None and not self._end_taken
        )

    def take(self) -> tuple[str, list[int], list[Logprobs]]:
        """Text, tokens and log-probabilities since the last call; text that may yet become a stop
        string is held back.
        """
        end = len(self._fresh) - (0 if self.finish_reason else self._finder.held)
        text, self._fresh = self._fresh[:end], self._fresh[end:]
        self._taken.append(text)
        first, self._num_taken = self._num_taken, len(self.token_ids)
        self._end_taken = self.finish_reason is not None
        return text, self.token_ids[first:], self.logprobs[max(0, first - self._num_resumed) :]

    def completion(self, index: int) -> CompletionOutput:
        """The output as it is now, as the record that a caller sees."""
        return CompletionOutput(
            index,
            self.text,
            self.token_ids,
            None if self._params.logprobs is None else self.logprobs,
            self.cumulative_logprob,
            self.finish_reason,
            self.stop_reason,
        )

    def _add_text(self, piece: str, armed: bool) -> str | None:
        """Append text up to the first stop string in it, and return that string."""
        stop = self._finder.push(piece, armed)
        if stop is None:
            self._fresh += piece
            return None
        self._fresh += piece[: stop.end]
        if not self._params.include_stop_str_in_output:
            self._fresh = self._fresh[
                : -len(stop.text)
            ]  # `take` has not returned any of it, since a match is held back
        return stop.text


def end_ids(params: SamplingParams, tokenizer: TokenizerView) -> frozenset[int]:
    """The tokens that end an output."""
    return frozenset(params.stop_token_ids or ()) | frozenset(
        () if params.ignore_eos else tokenizer.eos_ids
    )


def describe(tokenizer: TokenizerView, token: int, logprobs: TokenLogprobs) -> Logprobs:
    """Log-probability records of a token and of the likeliest tokens at its position, by
    token id.
    """
    ids, values = [token, *logprobs.top_ids], [logprobs.logprob, *logprobs.top_logprobs]
    ranks = [logprobs.rank, *range(1, len(ids))]
    texts = [tokenizer.token_bytes(id_).decode(errors="replace") for id_ in ids]
    return {id_: Logprob(*fields) for id_, *fields in zip(ids, values, ranks, texts, strict=True)}
