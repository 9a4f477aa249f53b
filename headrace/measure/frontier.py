"""The Pareto-optimal formats of a model."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.errors import RequestError

_BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?(MB|GB|tok/s)")
_UNITS = {"MB": 1e6, "GB": 1e9, "tok/s": 1.0}


class Candidate(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def decode(self) -> float: ...

    @property
    def loss(self) -> float: ...


class Budget(NamedTuple):
    limit: float
    is_speed: bool

    def allows(self, candidate: Candidate) -> bool:
        if self.is_speed:
            return candidate.decode >= self.limit
        return candidate.weight_bytes <= self.limit


def parse_budget(text: str) -> Budget:
    """Parse `2GB`, `300MB` or `50tok/s`. Raises RequestError."""
    match = _BUDGET.fullmatch(text.strip())
    if not match or float(match[1]) == 0:
        raise RequestError(
            f"budget {text[:40]!r} is neither a size nor a speed; write a size such as 2GB or "
            "300MB, or a speed such as 50tok/s"
        )
    number, unit = match.groups()
    return Budget(limit=float(number) * _UNITS[unit], is_speed=unit == "tok/s")


def pareto_frontier(candidates: Sequence[Candidate]) -> list[str]:
    """Names of the candidates that no other beats in quality and speed, fastest first."""
    frontier: list[str] = []
    min_loss = float("inf")
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.decode, candidate.loss)):
        if candidate.loss < min_loss:
            frontier.append(candidate.name)
            min_loss = candidate.loss
    return frontier


def best_within(candidates: Sequence[Candidate], budget: Budget) -> str:
    """Name of the best candidate. Raises RequestError if none fits the budget."""
    allowed = [candidate for candidate in candidates if budget.allows(candidate)]
    if allowed:
        return min(allowed, key=lambda candidate: candidate.loss).name
    if budget.is_speed:
        fastest = max(candidates, key=lambda candidate: candidate.decode)
        raise RequestError(
            f"budget {budget.limit:,.1f} tok/s is above the speed of every format; "
            f"the fastest, {fastest.name}, decodes {fastest.decode:,.1f} tokens/s"
        )
    smallest = min(candidates, key=lambda candidate: candidate.weight_bytes)
    raise RequestError(
        f"budget {budget.limit / 1e6:,.0f} MB is below the size of every format; "
        f"the smallest, {smallest.name}, takes {smallest.weight_bytes / 1e6:,.0f} MB"
    )
