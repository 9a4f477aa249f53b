"""Rotary frequencies: the published ways to stretch them to longer contexts (as transformers'
`modeling_rope_utils`).
"""

import math

import numpy as np
from numpy.typing import NDArray

from headrace.model.spec import RopeSpec

Frequencies = NDArray[np.float64]


def inverse_frequencies(
    rope: RopeSpec, max_context: int, context: int
) -> tuple[Frequencies, float]:
    """Radians per position of each rotated pair, [dim / 2], and the factor on cosines and sines.

    `max_context` stands in for the context length of the original training where the checkpoint
    does not give one. Rules that go by the length of a text take `context`, the most that any may
    have, so that no length that is reached changes a number.
    """
    original_context = rope.original_context or max_context
    is_long = rope.scaling == "longrope" and context > original_context
    theta = (
        _dynamic_theta(rope, original_context, context) if rope.scaling == "dynamic" else rope.theta
    )
    frequencies: Frequencies = theta ** -(np.arange(0, rope.dim, 2) / rope.dim)
    if factors := rope.long_factors if is_long else rope.factors:
        frequencies = frequencies / np.array(factors)
    match rope.scaling:
        case "none" | "dynamic":
            return frequencies, 1.0
        case "linear":
            return frequencies / rope.factor, 1.0
        case "llama3":
            return _llama3(frequencies, rope, original_context), 1.0
        case "yarn":
            return _yarn(frequencies, rope, original_context), _yarn_attention_factor(rope)
        case "longrope":
            return frequencies, _longrope_attention_factor(rope, original_context)


def _dynamic_theta(rope: RopeSpec, original_context: int, context: int) -> float:
    """A base with which the slowest pair turns as often over a text of `context` tokens as it did
    over the original ones.
    """
    stretch = rope.factor * max(context, original_context) / original_context - (rope.factor - 1)
    return float(rope.theta * stretch ** (rope.dim / (rope.dim - 2)))


def _longrope_attention_factor(rope: RopeSpec, original_context: int) -> float:
    """sqrt(1 + ln(factor) / ln(original context)), where the file has none (Ding et al. 2024)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return (
        1.0
        if rope.factor <= 1
        else math.sqrt(1 + math.log(rope.factor) / math.log(original_context))
    )


def _llama3(frequencies: Frequencies, rope: RopeSpec, original_context: int) -> Frequencies:
    """Keep the fast pairs, slow the others down by `factor`, and blend in between (Llama 3.1,
    2024).
    """
    turns = original_context * frequencies / (2 * math.pi)
    keep = np.clip(
        (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1
    )
    return frequencies * (keep + (1 - keep) / rope.factor)


def _yarn(frequencies: Frequencies, rope: RopeSpec, original_context: int) -> Frequencies:
    """Interpolate by parts: a linear ramp over the pairs (Peng et al. 2023, arXiv 2309.00071,
    section 3.2).
    """

    def pair_that_turns(times: float) -> float:
        return (
            rope.dim
            * math.log(original_context / (times * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    slow: Frequencies = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)
    return frequencies * (slow / rope.factor + (1 - slow))


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_temperature(rope.factor, rope.mscale) / yarn_temperature(
            rope.factor, rope.mscale_all_dim
        )
    return yarn_temperature(rope.factor)


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    """The recommended factor on cosines and sines, 0.1 ln(factor) + 1 (Peng et al. 2023, equation
    22).
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
