"""Batches and moves of slots, most of them nearly valid, on a running plan: each is
executed or refused.
"""

import random

from headrace.errors import RequestError
from tests.backend import hostile

BATCHES = 20
"""Batches per case, as a plan costs more than a batch."""


def case(rng: random.Random) -> bytes:
    return rng.randbytes(8)


def run(case: bytes) -> None:
    rng, plan = random.Random(case), hostile.furnished(None)
    calls = [(plan.run, hostile.batch), (plan.move_slots, hostile.BUILDER["move_slots"])] * BATCHES
    if not all([hostile.attempt(call, *arguments(rng)) for call, arguments in calls]):
        raise RequestError("a call was refused")
