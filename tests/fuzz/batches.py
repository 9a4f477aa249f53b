"""Batches and moves of slots, most of them nearly right, on a plan that runs: each has an answer, or is refused."""

import random

from tests.backend import hostile

BATCHES = 20
"""In each case: a plan costs more than a batch."""


def case(rng: random.Random) -> bytes:
    return rng.randbytes(8)


def run(case: bytes) -> None:
    rng = random.Random(case)
    plan = hostile.furnished(None)
    for _ in range(BATCHES):
        hostile.attempt(plan.run, *hostile.batch(rng))
        hostile.attempt(plan.move_slots, *hostile.BUILDER["move_slots"](rng))
