"""Which of several ways to quantise a model are worth having, and which fits a budget best."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.errors import RequestError

_BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?(MB|GB|tok/s)")
_UNITS = {"MB": 1e6, "GB": 1e9, "tok/s": 1.0}


class Candidate(Protocol):
    """A way to quantise a model."""

    @property
    def name(self) -> str: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def decode(self) -> float:
        """Tokens/s."""
        ...

    @property
    def loss(self) -> float:
        """What it costs in quality, the less the better."""
        ...


class Budget(NamedTuple):
    """What a model may need at most, or how fast it has to be at least."""

    limit: float
    is_speed: bool

    def holds(self, candidate: Candidate) -> bool:
        return (
            candidate.decode >= self.limit
            if self.is_speed
            else candidate.weight_bytes <= self.limit
        )


def read_budget(text: str) -> Budget:
    """A budget such as 2GB, 300MB or 50tok/s. Raises RequestError."""
    found = _BUDGET.fullmatch(text.strip())
    if not found or float(found[1]) == 0:
        raise RequestError(
            f"--budget {text[:40]!r}: say how much memory, such as 2GB or 300MB, or how "
            "fast, such as 50tok/s"
        )
    return Budget(float(found[1]) * _UNITS[found[2]], found[2] == "tok/s")


def frontier(candidates: Sequence[Candidate]) -> list[str]:
    """The names of those that none surpasses in quality and speed at once, the fastest first."""
    best: list[str] = []
    least = float("inf")
    for candidate in sorted(candidates, key=lambda each: (-each.decode, each.loss)):
        if candidate.loss < least:
            best.append(candidate.name)
            least = candidate.loss
    return best


def advice(candidates: Sequence[Candidate], budget: Budget) -> str:
    """The name of the one with the least loss of those within the budget. Raises RequestError where
    there is none.
    """
    within = [candidate for candidate in candidates if budget.holds(candidate)]
    if within:
        return min(within, key=lambda each: each.loss).name
    if budget.is_speed:
        nearest = max(candidates, key=lambda each: each.decode)
        raise RequestError(
            f"no format decodes {budget.limit:,.1f} tokens/s; the fastest, "
            f"{nearest.name}, has {nearest.decode:,.1f}"
        )
    nearest = min(candidates, key=lambda each: each.weight_bytes)
    size = (
        f"{budget.limit / 1e6:,.0f} MB; the smallest, {nearest.name}, has "
        f"{nearest.weight_bytes / 1e6:,.0f}"
    )
    raise RequestError(f"no format fits in {size}")
