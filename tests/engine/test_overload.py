"""Far more work than memory: every admitted request ends within a bound, and requests that can
never fit are refused.
"""

import random
from collections import Counter
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.errors import RequestError
from headrace.outputs import RequestOutput
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.engine.toy import VOCAB, plain_decoding, toy_engine

NUM_BLOCKS, BLOCK_SIZE, LONGEST = 64, 4, 320


class Preemptions:
    """Counts the preemptions of each sequence, and those before it had sampled a token."""

    def __init__(self, engine: Engine) -> None:
        self.all: Counter[tuple[int, int]] = Counter()
        self.vain: Counter[tuple[int, int]] = Counter()
        scheduler = engine._scheduler
        preempt = scheduler._preempt

        def counted(seq: Sequence) -> None:
            self.all[seq.seq_id] += 1
            self.vain[seq.seq_id] += not seq.has_sampled
            preempt(seq)

        scheduler._preempt = counted  # type: ignore[method-assign]


def requests(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams, int]]:
    """Prompts, parameters and priorities: mostly small, some as large as the cache, a few larger;
    half share a prefix.
    """
    made = []
    for i in range(count):
        length = rng.choice([3, 8, 13, 20, 34, 55] * 4 + [144, 240, 300])
        prompt = ([7] * length if rng.random() < 0.5 else [])[: length // 2]
        prompt += [rng.randrange(VOCAB) for _ in range(length - len(prompt))]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 4]), seed=i, max_tokens=rng.randint(1, 32)
        )
        made.append((prompt, params, rng.choice([0, 0, 0, -1, 1])))
    return made


@pytest.mark.parametrize(("windows", "prefix_cache"), [((0,), True), ((0,), False), ((0, 9), True)])
def test_a_thousand_requests_in_64_blocks(windows: tuple[int, ...], prefix_cache: bool) -> None:
    pools: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "windows": windows}
    engine = toy_engine(
        **pools, max_model_len=LONGEST, max_num_seqs=32, threads=1, prefix_cache=prefix_cache
    )
    counts = Preemptions(engine)
    admitted: dict[str, tuple[list[int], SamplingParams, int]] = {}
    for prompt, params, priority in requests(random.Random(3), 1000):
        if len(prompt) + (params.max_tokens or 0) - 1 > NUM_BLOCKS * BLOCK_SIZE:
            with pytest.raises(
                RequestError, match=r"need up to \d+ blocks of 4 tokens, but the cache has 64"
            ):
                engine.add_request(prompt, params, options=RequestOptions(priority=priority))
        else:
            admitted[
                engine.add_request(prompt, params, options=RequestOptions(priority=priority))
            ] = (
                prompt,
                params,
                priority,
            )
    assert len(admitted) < 980
    ended: dict[str, tuple[int, RequestOutput]] = {}
    while engine.has_work:
        ended |= {u.request_id: (engine.stats().steps, u.result) for u in engine.step() if u.result}
    assert ended.keys() == admitted.keys()

    # The first sequence in rank has a row in every step. So a request has ended after one step for
    # each token of its own sequences and of the requests before it.
    bound, num_tokens = 0, 0
    for request_id in sorted(admitted, key=lambda r: (admitted[r][2], int(r))):
        prompt, params, _ = admitted[request_id]
        step, result = ended[request_id]
        bound += params.n * (len(prompt) + (params.max_tokens or 0))
        assert step <= bound
        num_tokens += sum(len(output.token_ids) for output in result.outputs)
        for output in result.outputs[:: 1 + int(request_id) % 7]:
            assert prompt + output.token_ids == plain_decoding(
                prompt, params, output.index, LONGEST
            )
            key = (int(request_id), output.index)
            assert counts.all[key] - counts.vain[key] <= len(
                output.token_ids
            )  # a token for each time it gave way
    stats = engine.stats()
    assert stats.preemptions == counts.all.total() > 100
    assert counts.vain.total() <= num_tokens / BLOCK_SIZE
    assert (stats.blocks_free, stats.running, stats.waiting) == (NUM_BLOCKS * len(windows), 0, 0)
    assert (stats.cached_tokens > 0) == prefix_cache


@pytest.mark.parametrize("windows", [(0,), (0, 4)])
def test_a_sequence_samples_before_it_is_preempted(windows: tuple[int, ...]) -> None:
    """While a prompt takes many steps, the growing sequences preempt each other, although they came
    before it.
    """
    chunks: dict[str, Any] = {"chunked_prefill_size": 1, "attention_crossover": 0.01}
    engine = toy_engine(
        num_blocks=25, block_size=2, max_model_len=40, windows=windows, prefix_cache=False, **chunks
    )
    counts = Preemptions(engine)
    for i, length in enumerate([2, 2, 2, 26, 2, 2]):
        engine.add_request([i] * length, SamplingParams(seed=i, max_tokens=14))
        engine.step()
    while engine.has_work:
        engine.step()
    assert counts.all.total() > 2
    assert counts.vain.total() == 0
