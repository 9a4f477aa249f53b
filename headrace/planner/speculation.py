"""What speculative decoding brings: tokens per step from how often drafts are right, and the speed that follows from what steps cost."""

import random
from collections.abc import Sequence
from typing import NamedTuple


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens of a step with a chain of `depth` drafts, each right with chance `acceptance` if those before it are.

    (1 - a^(K+1)) / (1 - a): the drafts up to the first wrong one, and the token that the target draws behind them (Leviathan et al.
    2023, equation 1).
    """
    return float(depth + 1) if acceptance == 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)


def simulated_tokens(acceptance: Sequence[float], steps: int, seed: int = 0) -> float:
    """The same by trying: mean tokens of a step, with a chance for each depth."""
    rng = random.Random(seed)
    total = 0
    for _ in range(steps):
        total += 1
        for chance in acceptance:
            if rng.random() >= chance:
                break
            total += 1
    return total / steps


class Costs(NamedTuple):
    """Seconds of steps."""

    target: Sequence[float]
    """Of the target with 1, 2, ... rows: the last token, and drafts behind it."""
    draft: float
    """Of the draft, for one draft."""


class Gain(NamedTuple):
    """What a depth brings."""

    depth: int
    tokens: float
    """Of a step."""
    speedup: float
    """Against plain decoding; below 1 speculation costs more than it brings."""


def gain(acceptance: float, depth: int, costs: Costs) -> Gain:
    """Tokens of a step, over what its drafts and its target rows cost in plain steps (Leviathan et al. 2023, theorem 3.8, with
    the target's own cost of more rows).
    """
    tokens = expected_tokens(acceptance, depth)
    return Gain(depth, tokens, tokens * costs.target[0] / (costs.target[depth] + depth * costs.draft))


def best_gain(acceptance: float, costs: Costs) -> Gain:
    """The fastest depth of those whose costs are known, at least 1."""
    return max((gain(acceptance, depth, costs) for depth in range(1, len(costs.target))), key=lambda g: g.speedup)
