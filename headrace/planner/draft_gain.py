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


class ExitRound(NamedTuple):
    depth: int
    """Tokens that may leave early in a row, before a full step."""
    cost: float
    """Of a token, in the unit of the costs."""


def exit_round(share: float, costs: Costs, depth: int | None = None) -> ExitRound:
    """Expected cost of a token with an early exit, at `depth` or at the best depth.

    Each token leaves with probability `share`. The first layers try up to `depth` tokens, until one
    stays, and a full step then computes the further layers of all of them.

    Args:
        costs: of the full step with 0, 1, ... tokens that left, and of a step of the first layers.
    """
    depths = range(len(costs.target)) if depth is None else [depth]
    return min((_exit_round(share, depth, costs) for depth in depths), key=lambda one: one.cost)


def _exit_round(share: float, depth: int, costs: Costs) -> ExitRound:
    tries = expected_tokens(share, depth - 1) if depth else 0.0
    full = sum((1 - share) * share**left * costs.target[left] for left in range(depth))
    full += share**depth * costs.target[depth]
    return ExitRound(depth, (tries * costs.draft + full) / expected_tokens(share, depth))
