"""One request of a fleet, with what its client has been told of it: enough for another replica to
go on with it.
"""

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import msgspec

from headrace.remote import frames
from headrace.sampling.sampler import derive_seed
from headrace.sampling_params import SamplingParams

_LEAST_SECONDS = 1e-3


def with_seed(asked: frames.Add, seed: int, number: int) -> frames.Add:
    """The request with the seed that an engine of this seed would derive for its request of this
    number, if it has none of its own.
    """
    params = asked.params or (None if asked.pooling else SamplingParams())
    if params and params.seed is None:
        params = replace(params, seed=derive_seed(seed, number))
    return msgspec.structs.replace(asked, params=params)


class Resumable:
    """A request, and how far it has come. Times are seconds by `clock`."""

    def __init__(self, asked: frames.Add, clock: Callable[[], float] = monotonic) -> None:
        """`asked` has a seed."""
        self.losses = 0
        """Replicas that went away under it."""
        self._asked = asked
        self._clock = clock
        self._begun = clock()
        self._first_token: float | None = None
        params = asked.params
        self._begins_anew = (
            params is None or params.beam_width is not None or asked.pooling is not None
        )
        """Whether nothing is told of it before its end, so that it never goes on behind its
        outputs.
        """
        self._outputs = [tokens[:] for tokens in asked.output_token_ids] or [
            [] for _ in range(params.n if params else 1)
        ]
        self._finished = set[int]()

    @property
    def seconds_left(self) -> float | None:
        """Until its time is up; None: it may take for ever."""
        asked = self._asked.options.timeout
        return None if asked is None else max(_LEAST_SECONDS, asked - (self._clock() - self._begun))

    @property
    def has_told_all(self) -> bool:
        """Whether all its outputs have come to their ends, of which its client knows."""
        return not self._begins_anew and len(self._finished) == len(self._outputs)

    def asked(self) -> frames.Add:
        """What the next replica is asked for: all that is left of it."""
        if not self.losses:
            return self._asked
        options = replace(self._asked.options, timeout=self.seconds_left)
        left = msgspec.structs.replace(self._asked, options=options)
        # its prompt log-probabilities come at its end: a token more, which is dropped, brings them
        if self.has_told_all:
            params = SamplingParams(
                max_tokens=1, temperature=0, prompt_logprobs=self._prompt_logprobs
            )
            return msgspec.structs.replace(left, params=params)
        if self._begins_anew or not any(self._outputs):
            return left
        return msgspec.structs.replace(
            left, output_token_ids=[tokens[:] for tokens in self._outputs]
        )

    def tell(self, news: frames.StepOutput) -> frames.StepOutput | None:
        """What the client is to be told; None for what it knows."""
        if news.index in self._finished:
            return None
        if self._first_token is None:
            self._first_token = self._clock()
        self._outputs[news.index] += news.token_ids
        if news.finish_reason:
            self._finished.add(news.index)
        return news

    def end(self, ended: frames.Ended) -> frames.Ended:
        """How it ended; after a loss, with times that sum to the whole time that it took."""
        if not self.losses:
            return ended
        now = self._clock()
        first = now if self._first_token is None else self._first_token
        queue = min(ended.queue, first - self._begun)
        return msgspec.structs.replace(
            ended, queue=queue, prefill=first - self._begun - queue, decode=now - first
        )

    def end_of_all(self) -> frames.Ended | None:
        """How it ended, if its client has been told all but that; None where a replica must be
        asked.
        """
        if not self.has_told_all or self._prompt_logprobs is not None:
            return None
        return self.end(
            frames.Ended(id=self._asked.id, prompt_tokens=len(self._asked.prompt_token_ids))
        )

    @property
    def _prompt_logprobs(self) -> int | None:
        return self._asked.params.prompt_logprobs if self._asked.params else None
