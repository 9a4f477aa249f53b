"""Time of a routing decision with a full memory of prefixes: processor seconds of its thread."""

from dataclasses import dataclass
from time import thread_time

import numpy as np
from replica import BLOCK_SIZE, SETUP

from headrace.scaleout.prefix_router import PrefixRouter, RoutedRequest

MAX_BLOCKS = 256
_VOCAB = 50_000


@dataclass
class Decisions:
    """Seconds of decisions over prompts of one length."""

    replicas: int
    prompt_len: int
    count: int
    median: float
    p99: float
    slowest: float


def time_decisions(replicas: int, prompt_len: int, count: int, seed: int) -> Decisions:
    """Every other prompt begins with one of eight prefixes of half its length. The router's memory
    is full, and `count` requests run.
    """
    rng = np.random.default_rng(seed)
    router = PrefixRouter(BLOCK_SIZE, MAX_BLOCKS)
    for number in range(replicas):
        router.join(str(number), "boot", SETUP.speed())
    prefixes = rng.integers(_VOCAB, size=(8, prompt_len // 2)).tolist()
    to_fill = 2 * replicas * MAX_BLOCKS * BLOCK_SIZE // prompt_len
    seconds: list[float] = []
    running: list[tuple[RoutedRequest, list[int]]] = []
    for i in range(to_fill + count):
        tokens = rng.integers(_VOCAB, size=prompt_len).tolist()
        if i % 2:
            tokens[: prompt_len // 2] = prefixes[i // 2 % 8]
        begun = thread_time()
        routed = router.route(tokens)
        seconds.append(thread_time() - begun)
        running.append((routed, tokens))
        if len(running) > count:
            routed, tokens = running.pop(0)
            router.first_token(routed)
            router.ended(routed, [*tokens, 0])
    timed = np.array(seconds[to_fill:])
    return Decisions(
        replicas,
        prompt_len,
        count,
        float(np.median(timed)),
        float(np.percentile(timed, 99)),
        float(timed.max()),
    )
