"""Native samplers, and functions on single rows of logits."""

import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headrace._native import Sampler
from headrace._native import token_logprobs as native_token_logprobs
from headrace.batch import TokenLogprobs
from headrace.sampling_params import SAMPLING_FIELDS, SamplingParams

__all__ = [
    "NativeSample",
    "Sampler",
    "derive_seed",
    "make_sampler",
    "random_seed",
    "token_logprobs",
    "with_logprobs",
]

_SAMPLER_OPTIONS = [row.name for row in SAMPLING_FIELDS.values() if row.is_sampler_option]
NativeSample = tuple[int, tuple[float, int, list[int], list[float]] | None]
"""A token and the fields of its `TokenLogprobs`."""


def make_sampler(
    params: SamplingParams, prompt: list[int], vocab_size: int, seed: int, end_ids: Iterable[int]
) -> Sampler:
    """The native sampler of a request, which bans `end_ids` before `min_tokens`."""
    options = {name: getattr(params, name) for name in _SAMPLER_OPTIONS}
    options["top_k"] = max(params.top_k, 0)
    return Sampler(
        vocab_size,
        prompt,
        seq_index=0,
        seed=seed,
        logit_bias=list((params.logit_bias or {}).items()),
        # A tokenizer may have more tokens than the model.
        banned=[token for token in end_ids if token < vocab_size],
        banned_until=len(prompt) + params.min_tokens,
        isa=_isa(),
        **options,
    )


def random_seed() -> int:
    """Return 64 random bits of the operating system."""
    return int.from_bytes(os.urandom(8), "little")


def derive_seed(seed: int, name: int | str) -> int:
    """The seed of a request without one: 64 bits from a base seed and its number or name."""
    # hashlib loads OpenSSL, and `headrace run` sets a seed.
    from hashlib import blake2b

    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def token_logprobs(logits: NDArray[np.float32], token: int, num_logprobs: int) -> TokenLogprobs:
    """Log-probabilities of a token under a row [vocab]. Raises NonFiniteLogitsError."""
    return TokenLogprobs(*native_token_logprobs(logits, token, num_logprobs, _isa()))


def with_logprobs(logits: NDArray[np.float32], token: int, num_logprobs: int) -> NativeSample:
    """Log-probabilities under a row [vocab] of a token that no sampler chose; none for -1."""
    if num_logprobs < 0:
        return token, None
    return token, native_token_logprobs(logits, token, num_logprobs, _isa())


def _isa() -> str:
    return os.environ.get("HEADRACE_ISA", "")
