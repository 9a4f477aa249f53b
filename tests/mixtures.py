"""Random mixtures of all kinds of requests, each of which has the tokens that it has alone.

`HEADRACE_MIXTURES=2000` before a test of mixtures is its long form; with `--hypothesis-seed N` it
has pieces that differ. It takes more than the 300 seconds of a test: add
`--timeout 0 -o faulthandler_timeout=0`.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from headrace.engine.engine import Engine
from headrace.outputs import RequestOutput, Update
from headrace.request import Pooling, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputs
from tests.engine.test_promise import same
from tests.tiny import drain

MIXTURES = int(os.environ.get("HEADRACE_MIXTURES", "6"))


class Ask(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    pooling: Pooling | None = None


NAMED: dict[str, Any] = {"logprob_token_ids": [1, 2, 3]}


def _greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **options)


ASKS = [
    Ask([7, 8, 9, 7], _greedy(max_tokens=6)),
    Ask([5], _greedy(max_tokens=5, logprobs=2)),
    Ask([5, 4, 3], SamplingParams(n=2, seed=2, max_tokens=4, top_p=0.9)),
    Ask([9, 9], SamplingParams(seed=3, max_tokens=5, repetition_penalty=1.3, top_k=30)),
    Ask([9, 1], _greedy(max_tokens=5, presence_penalty=2.0, frequency_penalty=0.3, min_tokens=3)),
    Ask(list(range(1, 12)), _greedy(max_tokens=3, prompt_logprobs=1)),
    Ask([2, 4, 2, 4], SamplingParams(n=2, seed=5, max_tokens=3, prompt_logprobs=0)),
    Ask([1, 2, 3], SamplingParams(beam_width=2, max_tokens=3)),
    Ask([3, 1, 4, 1, 5], SamplingParams(seed=4, max_tokens=4, logit_bias={4: 3.0, 5: -100.0})),
    Ask([4, 5, 6], SamplingParams(seed=6, max_tokens=4, min_p=0.05, logprobs=0, **NAMED)),
    Ask([7, 9], _greedy(max_tokens=5, structured_outputs=StructuredOutputs(regex="[a-c]{2,5}d"))),
    Ask([8, 2, 8, 2, 8], _greedy(max_tokens=8, stop=["b", "ka"], ignore_eos=True)),
    Ask(list(range(30)), SamplingParams(seed=7, max_tokens=5, temperature=0.7, logprobs=1)),
    Ask([1], SamplingParams(), "last"),
    Ask([6, 6, 6, 1, 2, 3], SamplingParams(), "mean"),
    CLS := Ask(list(range(20, 29)), SamplingParams(), "cls"),
]


class Arrival(NamedTuple):
    """A request, and the number of steps before the next one; the request may be ended then."""

    which: int
    gap: int = 0
    is_urgent: bool = False
    is_aborted: bool = False


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        which=st.integers(0, len(ASKS) - 1),
        gap=st.integers(0, 3),
        is_urgent=st.sampled_from([False, False, True]),
        is_aborted=st.sampled_from([False, False, False, True]),
    ),
    min_size=2,
    max_size=6,
)


def add(engine: Engine, ask: Ask, priority: int = 0, adapter: str | None = None) -> str:
    pooling = PoolingParams(pooling=ask.pooling) if ask.pooling else None
    options = RequestOptions(priority=priority, adapter=adapter)
    return engine.add(engine.check(ask.prompt, ask.params, options, pooling=pooling))


def result_of(engine: Engine, ask: Ask, adapter: str | None = None) -> RequestOutput:
    """The result of a request that comes alone."""
    add(engine, ask, adapter=adapter)
    return next(update.result for update in drain(engine) if update.result)


def mixture_is_right(
    engine: Engine,
    arrivals: Sequence[Arrival],
    expected: Sequence[RequestOutput],
    asks: Sequence[Ask],
    adapters: Mapping[int, str | None],
) -> None:
    """Serve a mixture, and compare its results. `adapters` are by the number of the arrival."""
    updates, ids = list[Update](), list[str]()
    aborted = dict[str, RequestOutput | None]()
    for number, arrival in enumerate(arrivals):
        priority = -int(arrival.is_urgent)
        ids.append(add(engine, asks[arrival.which], priority, adapters.get(number)))
        for _ in range(arrival.gap):
            updates += engine.step()
        if arrival.is_aborted:
            aborted[ids[-1]] = engine.abort(ids[-1])
    updates += drain(engine)

    results = {update.request_id: update.result for update in updates if update.result}
    for request_id, arrival, truth in zip(ids, arrivals, expected, strict=True):
        if cut := aborted.get(request_id):
            has_begun(cut, truth, asks[arrival.which].params)
        else:
            same(results[request_id], truth, exact=True)
            np.testing.assert_array_equal(results[request_id].embedding, truth.embedding)
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    assert stats.failed_steps == stats.proposer_failures == 0


def has_begun(cut: RequestOutput, whole: RequestOutput, params: SamplingParams) -> None:
    """An aborted request has the first tokens of the whole one; beams change to their end."""
    for mine, expected in zip(cut.outputs, whole.outputs, strict=False):
        if params.beam_width is None:
            assert mine.token_ids == expected.token_ids[: len(mine.token_ids)]
