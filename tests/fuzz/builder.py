"""Calls of a plan's builder, most of them nearly valid, around batches: each is
executed or refused.
"""

import random

from headrace.errors import RequestError
from tests.backend import hostile

CALLS = 40


def case(rng: random.Random) -> bytes:
    return rng.randbytes(8)


def run(case: bytes) -> None:
    rng = random.Random(case)
    plan = hostile.furnished(rng)
    calls = [lambda: hostile.build(rng, plan)] * 3 + [
        lambda: hostile.attempt(plan.run, *hostile.batch(rng))
    ]
    if not all([rng.choice(calls)() for _ in range(CALLS)]):
        raise RequestError("a call was refused")
