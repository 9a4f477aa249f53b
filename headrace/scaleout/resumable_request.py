from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import msgspec

from headrace.remote import frames
from headrace.sampling.sampler import derive_seed
from headrace.sampling_params import SamplingParams

_MIN_SECONDS = 1e-3


def with_seed(request: frames.Add, seed: int, number: int) -> frames.Add:
    """Derive a missing seed as an engine would, so that all replicas sample the same tokens."""
    params = request.params or (None if request.pooling else SamplingParams())
    if params and params.seed is None:
        params = replace(params, seed=derive_seed(seed, number))
    return msgspec.structs.replace(request, params=params)


class ResumableRequest:
    """A request with a seed, and its progress in seconds of `clock`."""

    def __init__(self, request: frames.Add, clock: Callable[[], float] = monotonic) -> None:
        self.losses = 0
        self._request = request
        self._clock = clock
        self._started = clock()
        self._first_token: float | None = None
        params = request.params
        # Beam search and pooling have no output before the end, so another replica starts over.
        self._restarts_from_prompt = (
            params is None or params.beam_width is not None or request.pooling is not None
        )
        self._outputs = [tokens[:] for tokens in request.output_token_ids] or [
            [] for _ in range(params.n if params else 1)
        ]
        self._finished = set[int]()

    @property
    def seconds_left(self) -> float | None:
        timeout = self._request.options.timeout
        if timeout is None:
            return None
        return max(_MIN_SECONDS, timeout - (self._clock() - self._started))

    @property
    def has_all_outputs(self) -> bool:
        return not self._restarts_from_prompt and len(self._finished) == len(self._outputs)

    def remaining(self) -> frames.Add:
        if not self.losses:
            return self._request
        options = replace(self._request.options, timeout=self.seconds_left)
        remaining = msgspec.structs.replace(self._request, options=options)
        if self.has_all_outputs:
            # Prompt log-probabilities arrive at the end of a request: generate one token, which is
            # dropped, to get them.
            params = SamplingParams(
                max_tokens=1, temperature=0, prompt_logprobs=self._prompt_logprobs
            )
            return msgspec.structs.replace(remaining, params=params)
        if self._restarts_from_prompt or not any(self._outputs):
            return remaining
        return msgspec.structs.replace(
            remaining, output_token_ids=[tokens[:] for tokens in self._outputs]
        )

    def receive(self, output: frames.StepOutput) -> frames.StepOutput | None:
        """Returns None if the client has the output's end already."""
        if output.index in self._finished:
            return None
        if self._first_token is None:
            self._first_token = self._clock()
        self._outputs[output.index] += output.token_ids
        if output.finish_reason:
            self._finished.add(output.index)
        return output

    def with_total_times(self, ended: frames.Ended) -> frames.Ended:
        """Make the times sum to the duration of the request after a loss."""
        if not self.losses:
            return ended
        now = self._clock()
        first_token = now if self._first_token is None else self._first_token
        queue = min(ended.queue, first_token - self._started)
        detokenise = min(ended.detokenise, now - first_token)
        return msgspec.structs.replace(
            ended,
            queue=queue,
            prefill=first_token - self._started - queue,
            decode=now - first_token - detokenise,
            detokenise=detokenise,
        )

    def end_without_replica(self) -> frames.Ended | None:
        """Return the end if all outputs are complete; None if a replica must run."""
        if not self.has_all_outputs or self._prompt_logprobs is not None:
            return None
        prompt_tokens = len(self._request.prompt_token_ids)
        return self.with_total_times(frames.Ended(id=self._request.id, prompt_tokens=prompt_tokens))

    @property
    def _prompt_logprobs(self) -> int | None:
        return self._request.params.prompt_logprobs if self._request.params else None
