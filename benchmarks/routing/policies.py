"""The compared policies: the router of the package, and two that know no prefixes."""

from replica import BLOCK_SIZE, NUM_BLOCKS, SETUP

from headrace.simulator.routers import ByPrefix, RoundRobin, Router, TwoChoices


def make_policy(name: str, replicas: int, seed: int) -> Router:
    match name:
        case "headrace":
            speed = SETUP.speed()
            return ByPrefix(replicas, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, speed=speed)
        case "power of two":
            return TwoChoices(replicas, seed)
        case _:
            return RoundRobin(replicas)


POLICIES = ("headrace", "power of two", "round robin")
