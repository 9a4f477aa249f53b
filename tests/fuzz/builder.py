"""Calls of a plan's builder, most of them nearly right, before, between and after batches: each is done, or is refused."""

import random

from tests.backend import hostile

CALLS = 40


def case(rng: random.Random) -> bytes:
    return rng.randbytes(8)


def run(case: bytes) -> None:
    rng = random.Random(case)
    plan = hostile.furnished(rng)
    for _ in range(CALLS):
        if rng.randrange(4):
            hostile.build(rng, plan)
        else:
            hostile.attempt(plan.run, *hostile.batch(rng))
