"""A naive beam search, the reference for the engine. It computes each sequence from its first
token.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.sampling_params import SamplingParams
from tests.sampling.sampler_twin import SamplerTwin, logprobs


@dataclass
class Beam:
    """A sequence: its output tokens, and the sum of their log-probabilities."""

    tokens: list[int]
    total: float


def beam_search(
    prompt: list[int],
    params: SamplingParams,
    model: Callable[[list[int]], NDArray[np.float32]],  # logits after these tokens
    vocab: int,
    longest: int,
    end_ids: frozenset[int] = frozenset(),
    decode: Callable[[list[int]], str] = lambda tokens: "",
    allowed: Callable[[list[int]], Collection[int]] | None = None,
    logprobs: Callable[[NDArray[np.float32]], NDArray[np.float64]] = logprobs,
) -> list[Beam]:
    """Return the best `n` beams, best first; `longest` is the length of prompt and output at which
    a sequence ends. `allowed` gives the tokens that may follow an output; without any it ends.
    """
    width = params.beam_width or 0
    most = min(longest - len(prompt), params.max_tokens or longest)
    ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else end_ids)

    def score(beam: Beam) -> float:
        return beam.total / len(beam.tokens) ** params.length_penalty

    def finished(tokens: list[int]) -> bool:
        stopped = len(tokens) > params.min_tokens and (
            tokens[-1] in ends
            or any(
                decode(tokens).count(stop) > decode(tokens[:-1]).count(stop)
                for stop in params.stop or ()
            )
        )
        is_whole = allowed is not None and not allowed(tokens)
        return stopped or is_whole or len(tokens) == most

    live, done = [Beam([], 0.0)], list[Beam]()
    while live:
        candidates = []
        for index, beam in enumerate(live):
            row = logprobs(_adjusted(prompt, beam.tokens, params, model, vocab, ends))
            longer = [
                Beam([*beam.tokens, token], beam.total + float(row[token]))
                for token in (range(vocab) if allowed is None else allowed(beam.tokens))
                if row[token] > -np.inf
            ]
            candidates += [(-beam.total, index, beam.tokens[-1], beam) for beam in longer]
        ranked = [beam for *_, beam in sorted(candidates, key=lambda candidate: candidate[:3])]
        live = [beam for beam in ranked if not finished(beam.tokens)][:width]
        done = sorted(
            done + [beam for beam in ranked[:width] if finished(beam.tokens)],
            key=lambda beam: -score(beam),
        )[:width]
        if (
            len(done) == width
            and live
            and (params.early_stopping or score(live[0]) <= score(done[-1]))
        ):
            break
    return done[: params.n]


def _adjusted(
    prompt: list[int],
    tokens: list[int],
    params: SamplingParams,
    model: Callable[[list[int]], NDArray[np.float32]],
    vocab: int,
    ends: frozenset[int],
) -> NDArray[np.float32]:
    """Logits of the next token under biases, penalties and bans."""
    twin = SamplerTwin(
        vocab,
        prompt,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=list((params.logit_bias or {}).items()),
        banned=sorted(ends),
        banned_until=len(prompt) + params.min_tokens,
        output=list(tokens),
    )
    return twin.adjusted(model([*prompt, *tokens]), len(prompt) + len(tokens))
