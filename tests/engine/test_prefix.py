"""Prefix hits in the engine: fewer rows are computed, and the tokens stay the same."""

import random

import pytest

from headrace.engine.engine import Engine
from headrace.errors import RequestError
from headrace.outputs import RequestOutput
from headrace.request import DEFAULT_OPTIONS, RequestOptions
from headrace.sampling_params import SamplingParams
from tests.engine.toy import VOCAB, plain_decoding, toy_engine
from tests.tiny import drain, run_all, tiny_engine, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def one(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams = GREEDY,
    options: RequestOptions = DEFAULT_OPTIONS,
) -> RequestOutput:
    """Return the result of a request that runs alone."""
    engine.add_request(prompt, params, options)
    (result,) = [update.result for update in drain(engine) if update.result]
    return result


def test_a_prefix_hit_computes_only_the_rest() -> None:
    engine = toy_engine()
    first = one(engine, PROMPT)
    rows = engine.stats().rows
    again = one(engine, PROMPT)
    assert (first.cached_tokens, again.cached_tokens) == (0, 8)
    assert engine.stats().rows == 2 * rows - 8
    assert again.outputs == first.outputs
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.blocks_free) == (
        20,
        8,
        stats.blocks_total,
    )
    assert stats.blocks_cached == 3  # of 10 + 5 tokens with KV


def test_a_prefix_hit_on_output() -> None:
    """The prompt of the next turn contains the last response."""
    engine = toy_engine()
    first = one(engine, PROMPT)
    turn = PROMPT + first.outputs[0].token_ids + [3]
    assert one(engine, turn).cached_tokens == 12


def test_a_prefix_hit_on_a_running_request() -> None:
    engine = toy_engine()
    for prompt in (PROMPT, [*PROMPT[:8], 20]):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=20))
        engine.step()
    assert [request.cached_tokens for request in engine._requests.values()] == [0, 8]
    assert engine.stats().blocks_total - engine.stats().blocks_free == 3 + 1


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (4, 0), (5, 4)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    engine = toy_engine()
    for hit in (0, cached):
        assert one(engine, PROMPT[:length]).cached_tokens == hit


def test_no_prefix_hit_with_another_salt() -> None:
    engine = toy_engine()
    salted = [RequestOptions(cache_salt=salt) for salt in (None, "", "a", "b")]
    assert [one(engine, PROMPT, options=each).cached_tokens for each in salted] == [0] * 4
    assert [one(engine, PROMPT, options=each).cached_tokens for each in salted] == [8] * 4
    for salt in (7, b"a", "x" * 2000):
        with pytest.raises(RequestError, match="cache_salt must be text"):
            engine.add_request(PROMPT, GREEDY, options=RequestOptions(cache_salt=salt))  # type: ignore[arg-type]


def test_prompt_logprobs_are_computed_despite_a_prefix_hit() -> None:
    engine = toy_engine()
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    cold = one(engine, PROMPT, params)
    warm = one(engine, PROMPT, params)
    assert warm.cached_tokens == 0 and warm.prompt_logprobs == cold.prompt_logprobs
    assert len(warm.prompt_logprobs or []) == len(PROMPT)


def test_recorded_prompt_logprobs_are_not_recomputed() -> None:
    """A request that was preempted in its prompt continues after its recorded prompt
    log-probabilities.
    """
    engine = toy_engine(max_logit_rows=6)
    engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0))
    engine.step()
    (seq,) = engine._scheduler.running
    engine._scheduler._preempt(seq)
    assert (seq.computed, seq.max_cached) == (0, 6)
    engine.step()
    assert engine._loop.num_rows == 6 + 6  # four of the cache, six rows more
    drain(engine)


def test_preempted_siblings_hit_their_blocks() -> None:
    engine = toy_engine()
    params = SamplingParams(n=3, seed=5, max_tokens=12)
    engine.add_request(PROMPT, params)
    for _ in range(5):
        engine.step()
    scheduler = engine._scheduler
    for seq in [*scheduler.running]:
        scheduler._preempt(seq)
    rows = engine.stats().rows
    engine.step()
    assert (
        engine.stats().rows - rows == sum(len(b.known) - 1 - 12 for b in scheduler.running) == 3 * 3
    )
    (result,) = [update.result for update in drain(engine) if update.result]
    for output in result.outputs:
        assert PROMPT + output.token_ids == plain_decoding(PROMPT, params, output.index)


def test_equal_requests_at_once_end_on_equal_blocks() -> None:
    engine = toy_engine(max_model_len=40)
    for _ in range(4):
        engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=20))
    engine.step()
    assert engine.stats().blocks_total - engine.stats().blocks_free == 4 * 3
    engine.step()
    assert engine.stats().blocks_total - engine.stats().blocks_free == 2 + 4


def test_n_samples_share_memory() -> None:
    """n sequences of G tokens after a prompt of P tokens hold P + n G slots, rounded up to
    blocks.
    """
    n, length, generated, size = 8, 41, 16, 4
    engine = toy_engine(num_blocks=64, block_size=size, max_model_len=80)
    engine.add_request(
        [i % VOCAB for i in range(length)], SamplingParams(n=n, seed=1, max_tokens=generated + 1)
    )
    for _ in range(generated + 1):  # the last token drawn has no KV
        engine.step()
        stats = engine.stats()
        done = stats.steps - 1
        assert stats.blocks_total - stats.blocks_free <= length // size + n * -(
            -(length % size + done) // size
        )
    assert not engine.has_work and engine.stats().blocks_free == 64


def shared_prompts(count: int, vocab: int, longest: int) -> list[list[int]]:
    """Return prompts that mostly share a prefix with an earlier one."""
    rng = random.Random(0)
    prompts: list[list[int]] = [[0]]
    for _ in range(count):
        stem = rng.choice(prompts[-200:]) if rng.random() < 0.95 else []
        head = stem[: rng.randint(len(stem) // 2, len(stem))]
        prompts.append((head + [rng.randrange(vocab) for _ in range(rng.randint(1, 12))])[:longest])
    return prompts[1:]


def test_ten_thousand_prompts_with_and_without_prefix_cache() -> None:
    prompts = shared_prompts(10_000, VOCAB, 30)
    params = [
        SamplingParams(seed=i, temperature=0.0 if i % 3 else 0.9, max_tokens=1 + i % 3)
        for i in range(len(prompts))
    ]
    tokens = []
    for prefix_cache in (True, False):
        engine = toy_engine(num_blocks=200, max_num_seqs=16, threads=1, prefix_cache=prefix_cache)
        results = run_all(engine, list(zip(prompts, params, strict=True)))
        tokens.append([result.outputs[0].token_ids for result in results])
        stats = engine.stats()
        assert stats.blocks_free == stats.blocks_total
        assert sum(result.cached_tokens for result in results) == stats.cached_tokens
        assert (stats.cached_tokens > 0.3 * stats.prompt_tokens) == prefix_cache
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("slots", [192, 4096])
def test_kernels_with_and_without_prefix_cache(slots: int) -> None:
    model = tiny_model(0)
    prompts = [
        [token for token in prompt for _ in range(8)] for prompt in shared_prompts(150, 61, 15)
    ]  # blocks have 32 slots
    params = [
        SamplingParams(seed=i, temperature=0.7, max_tokens=1 + i % 6, logprobs=2)
        for i in range(len(prompts))
    ]
    requests = list(zip(prompts, params, strict=True))
    outputs = []
    for prefix_cache in (True, False):
        engine = tiny_engine(model, "cpu", slots=slots, prefix_cache=prefix_cache, eos_ids=(60,))
        results = [one(engine, *request) for request in requests] + run_all(engine, requests)
        outputs.append([result.outputs for result in results])
        assert (engine.stats().cached_tokens > 1000) == prefix_cache
    assert outputs[0] == outputs[1]
