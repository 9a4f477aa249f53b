"""A step is launched before the last one is finished if it does not depend on its results; the
tokens stay the same.
"""

from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.sampling_params import SamplingParams
from tests.engine.test_promise import REQUESTS, same
from tests.engine.toy import VOCAB, plain_decoding, toy_engine
from tests.late import LateExecutable
from tests.random_trees import RandomTrees
from tests.tiny import drain, run_all, tiny_engine, tiny_model


def overlaps(engine: Engine) -> int:
    executable = engine._loop.executable
    assert isinstance(executable, LateExecutable)
    return executable.overlaps


@pytest.mark.parametrize("multi_step_ms", [0, 1e6])
def test_steps_of_plain_decoding_overlap(multi_step_ms: float) -> None:
    requests = [
        ([1, 2, 3], SamplingParams(temperature=0, max_tokens=30)),
        ([4, 5], SamplingParams(seed=1, max_tokens=25, n=3)),
    ]
    late, plain = (toy_engine(late=late, multi_step_ms=multi_step_ms) for late in (True, False))
    for one, other in zip(run_all(late, requests), run_all(plain, requests), strict=True):
        same(one, other, exact=True)
    assert overlaps(late) > 20
    assert late.stats().blocks_free == late.stats().blocks_total and not late.has_work


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"proposer": RandomTrees(0, VOCAB, {}, max_nodes=4)}, {}),
        ({}, {"beam_width": 2, "temperature": 1.0}),
        ({"batching": "static"}, {}),
    ],
    ids=["drafts", "beams", "static"],
)
def test_steps_that_depend_on_results_do_not_overlap(
    options: dict[str, Any], params: dict[str, Any]
) -> None:
    engine = toy_engine(late=True, **options)
    run_all(
        engine, [([1, 2, 3], SamplingParams(**{"temperature": 0.0, "max_tokens": 12} | params))]
    )
    assert overlaps(engine) == 0


def test_blocks_of_an_aborted_request_are_freed_after_its_step() -> None:
    engine = toy_engine(late=True)
    request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.abort(request_id)
    assert engine.has_work and engine.stats().blocks_free < engine.stats().blocks_total
    engine.step()
    assert not engine.has_work and engine.stats().blocks_free == engine.stats().blocks_total


def test_an_abort_in_flight_does_not_change_other_requests() -> None:
    engine, params = toy_engine(late=True), SamplingParams(temperature=0, max_tokens=9)
    aborted, other = (engine.add_request(prompt, params) for prompt in ([1, 2, 3], [4, 5]))
    for _ in range(3):
        engine.step()
    engine.abort(aborted)
    assert engine.stats().running == 1
    (result,) = [update.result for update in drain(engine) if update.result]
    assert result.request_id == other and result.error is None
    assert [4, 5, *result.outputs[0].token_ids] == plain_decoding([4, 5], params, 0)
    assert engine.stats().blocks_free == engine.stats().blocks_total


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_steps_overlap_on_a_real_backend(backend: str) -> None:
    model = tiny_model(5, window=6)
    late, plain = (
        tiny_engine(model, backend, late=late, eos_ids=(60,), slots=3200) for late in (True, False)
    )
    for one, other in zip(run_all(late, REQUESTS * 2), run_all(plain, REQUESTS * 2), strict=True):
        same(one, other, exact=backend == "cpu")
    assert overlaps(late) > 5
