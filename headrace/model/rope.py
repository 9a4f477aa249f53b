"""Rotary frequencies, and rules that stretch them (`modeling_rope_utils` of transformers)."""

import math

import numpy as np
from numpy.typing import NDArray

from headrace.model.spec import RopeSpec

Frequencies = NDArray[np.float64]


def inverse_frequencies(
    rope: RopeSpec, max_context: int, context: int
) -> tuple[Frequencies, float]:
    """Radians per position of each pair, [dim / 2], and the factor of cosines and sines.

    `max_context` is a default. `context`, the max length of a sequence, replaces its current
    length, so that numbers do not change as it grows.
    """
    original_context = rope.original_context or max_context
    is_long = rope.scaling == "longrope" and context > original_context
    theta = rope.theta
    if rope.scaling == "dynamic":
        theta = _dynamic_theta(rope, original_context, context)
    frequencies: Frequencies = theta ** -(np.arange(0, rope.dim, 2) / rope.dim)
    if factors := rope.long_factors if is_long else rope.factors:
        frequencies = frequencies / np.array(factors)
    match rope.scaling:
        case "none" | "dynamic":
            return frequencies, _given_attention_factor(rope)
        case "linear":
            return frequencies / rope.factor, _given_attention_factor(rope)
        case "llama3":
            return _llama3(frequencies, rope, original_context), 1.0
        case "yarn":
            return _yarn(frequencies, rope, original_context), _yarn_attention_factor(rope)
        case "longrope":
            return frequencies, _longrope_attention_factor(rope, original_context)


def stretched_context(rope: RopeSpec, context: int) -> int:
    """Return the max length of a model that a rule stretches beyond its trained `context`.

    The rules llama3 and longrope do not count: files state their stretched length. vLLM has the
    same arithmetic.
    """
    match rope.scaling:
        case "yarn":
            return max(context, round((rope.original_context or context) * rope.factor))
        case "linear" | "dynamic":
            return max(context, round(context * rope.factor))
    return context


def _given_attention_factor(rope: RopeSpec) -> float:
    return 1.0 if rope.attention_factor is None else rope.attention_factor


def _dynamic_theta(rope: RopeSpec, original_context: int, context: int) -> float:
    stretch = rope.factor * max(context, original_context) / original_context - (rope.factor - 1)
    return float(rope.theta * stretch ** (rope.dim / (rope.dim - 2)))


def _longrope_attention_factor(rope: RopeSpec, original_context: int) -> float:
    """sqrt(1 + ln(factor) / ln(original context)), unless the file has one (Ding et al. 2024)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(original_context))


def _llama3(frequencies: Frequencies, rope: RopeSpec, original_context: int) -> Frequencies:
    """Keep fast pairs, divide slow pairs by `factor`, and blend between them (Llama 3.1, 2024)."""
    turns = original_context * frequencies / (2 * math.pi)
    keep = np.clip(
        (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1
    )
    return frequencies * (keep + (1 - keep) / rope.factor)


def _yarn(frequencies: Frequencies, rope: RopeSpec, original_context: int) -> Frequencies:
    """Blend by a linear ramp over the pairs (Peng et al. 2023, arXiv 2309.00071, section 3.2)."""

    def pair_with_turns(turns: float) -> float:
        return (
            rope.dim
            * math.log(original_context / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
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
        temperature = yarn_temperature(rope.factor, rope.mscale)
        return temperature / yarn_temperature(rope.factor, rope.mscale_all_dim)
    return yarn_temperature(rope.factor)


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    """Factor of cosines and sines, 0.1 ln(factor) + 1 (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
