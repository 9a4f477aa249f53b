from collections.abc import Sequence
from typing import NamedTuple


def expected_tokens(acceptance: float, depth: int) -> float:
    """Expected tokens of a step with `depth` draft tokens: (1 - a^(K+1)) / (1 - a).

    `acceptance` is the probability a of each draft token (Leviathan et al. 2023, equation 1).
    """
    if acceptance == 1:
        return float(depth + 1)
    return (1 - acceptance ** (depth + 1)) / (1 - acceptance)


class Costs(NamedTuple):
    """Measured times of steps."""

    target: Sequence[float]
    """Seconds of a target step with 0, 1, ... draft tokens."""
    draft: float
    """Seconds per token."""


class Gain(NamedTuple):
    depth: int
    tokens: float
    """Per step."""
    speedup: float
    """Speed over plain decoding."""


def gain(acceptance: float, depth: int, costs: Costs) -> Gain:
    """Expected gain of drafting `depth` tokens (Leviathan et al. 2023, theorem 3.8).

    The cost of the target may grow with its rows.
    """
    tokens = expected_tokens(acceptance, depth)
    step_seconds = costs.target[depth] + depth * costs.draft
    return Gain(depth=depth, tokens=tokens, speedup=tokens * costs.target[0] / step_seconds)


def best_gain(acceptance: float, costs: Costs) -> Gain:
    return max(
        (gain(acceptance, depth, costs) for depth in range(1, len(costs.target))),
        key=lambda gain: gain.speedup,
    )
