"""Exact verification: sample the next token, follow its draft node, else stop.

It is lossless: a sample depends only on the tokens before it and on the noise of its position.
"""

from collections.abc import Sequence
from typing import Any, cast

from headrace import _native
from headrace.batch import TokenLogprobs
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.verification import Logits


def verify_exact(
    ops: Sequence[SampleOp], logits: Logits, pool: _native.Pool
) -> list[SampleResult | None]:
    """Verifies all ops in one native call (csrc/sampler.h)."""
    results = _native.verify_exact(pool, logits, cast(Any, ops))  # their samplers are native
    return [None if result is None else _result(*result) for result in results]


def _result(
    tokens: list[int], path: list[int], logprobs: list[tuple[float, int, list[int], list[float]]]
) -> SampleResult:
    described = [TokenLogprobs(*fields) for fields in logprobs] if logprobs else []
    return SampleResult(tokens, path, described)
