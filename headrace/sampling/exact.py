"""Exact verification: draw the next token, go to the draft node that has it, and stop where there
is none.

It is lossless for any draft tree, any sampler and any penalty: a draw depends only on the tokens
before it and on the noise of its position, so the tokens are those of plain decoding for every
tree.
"""

from collections.abc import Sequence
from typing import Any, cast

from headrace import _native
from headrace.batch import TokenLogprobs
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.verification import Logits


def verify_exact(
    draws: Sequence[SampleOp], logits: Logits, pool: _native.Pool
) -> list[SampleResult | None]:
    """The results of all draws in one native call (csrc/sampler.h): a `Verifier`."""
    results = _native.verify_exact(pool, logits, cast(Any, draws))  # their samplers are native
    return [None if result is None else _drawn(*result) for result in results]


def _drawn(
    tokens: list[int], path: list[int], logprobs: list[tuple[float, int, list[int], list[float]]]
) -> SampleResult:
    return SampleResult(tokens, path, [TokenLogprobs(*fields) for fields in logprobs])
