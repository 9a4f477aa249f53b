"""Expected gain of speculative decoding: tokens per step by the acceptance rate, and speedup by the
costs of steps.
"""

from collections.abc import Sequence
from typing import NamedTuple


def expected_tokens(acceptance: float, depth: int) -> float:
    """Expected tokens of a step with a chain of `depth` drafts, each right with probability
    `acceptance` if those before it are.

    They are (1 - a^(K+1)) / (1 - a): the drafts up to the first wrong one, and the token that the
    target draws after them (Leviathan et al. 2023, equation 1).
    """
    return (
        float(depth + 1) if acceptance == 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    )


class Costs(NamedTuple):
    """What steps of the target and of the draft cost."""

    target: Sequence[float]
    """Seconds of a step of the target with 1, 2, ... rows: the last known token, and 0, 1, ...
    drafts after it.
    """
    draft: float
    """Seconds to draft one token."""


class Gain(NamedTuple):
    """The expected gain of chains of one depth."""

    depth: int
    tokens: float
    """Expected tokens of a step."""
    speedup: float
    """Tokens per second over those of plain decoding; below 1, speculation costs more than it
    gains.
    """


def gain(acceptance: float, depth: int, costs: Costs) -> Gain:
    """Gain of drafting `depth` tokens: those of a step over its cost in plain steps (Leviathan et
    al. 2023, theorem 3.8).

    Unlike in the theorem, the target's cost may grow with its rows.
    """
    tokens = expected_tokens(acceptance, depth)
    return Gain(
        depth, tokens, tokens * costs.target[0] / (costs.target[depth] + depth * costs.draft)
    )


def best_gain(acceptance: float, costs: Costs) -> Gain:
    """The gain of the fastest depth from 1 up to the largest whose cost is given."""
    return max(
        (gain(acceptance, depth, costs) for depth in range(1, len(costs.target))),
        key=lambda g: g.speedup,
    )
