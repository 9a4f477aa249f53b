"""Every method with every option, in pairs: tokens and log-probabilities are those of plain decoding, to the last bit."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from headrace.backend import Executable, compile_program
from headrace.model import trace_model
from headrace.request import RequestOutput, SamplingParams
from tests.composability import CASES, METHODS, OPTIONS, PAGE, REAL_CASES, Case, Method, page, title
from tests.engine.test_promise import same
from tests.engine.test_promise_real import KV, checkpoint, engine_on
from tests.tiny import Tensors, run_all, tiny_engine, tiny_model

PROMPTS = [[7, 8, 9] * 5, [3], [*range(1, 30), 1, 2, 3], [2, 4] * 7]
MAX_TOKENS = 44
ROOMY = 3200


def merged(case: Case, what: str) -> dict[str, Any]:
    return {name: value for option in case for name, value in getattr(option, what).items()}


@cache
def model(format: str) -> Any:
    return tiny_model(seed=3, format=format)


def parts(case: Case) -> tuple[tuple[Any, Tensors], list[tuple[list[int], SamplingParams]], dict[str, Any]]:
    """Model, requests, and options of both engines."""
    options = merged(case, "model")
    made = model(options.pop("format", "F32"))
    params = {"seed": 5, "max_tokens": MAX_TOKENS, **merged(case, "params")}
    return made, [(prompt, SamplingParams(**params)) for prompt in PROMPTS], options


@cache
def plain(case: Case) -> list[RequestOutput]:
    made, requests, options = parts(case)
    return [run_all(tiny_engine(made, "cpu", slots=ROOMY, **options), [request])[0] for request in requests]


@pytest.mark.parametrize("case", CASES, ids=title)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_tiny_model(method: Method, case: Case) -> None:
    made, requests, options = parts(case)
    options = {"slots": ROOMY, **options, **method.options, **merged(case, "engine")}
    if method.proposer:
        options["proposer"] = method.proposer(*made)
    engine = tiny_engine(made, "cpu", **options)
    for result, expected in zip(run_all(engine, requests), plain(case), strict=True):
        same(result, expected, exact=True)
    stats = engine.stats()
    assert method.happened(stats) and stats.proposer_failures == 0
    assert stats.blocks_free == stats.blocks_total
    assert bool(stats.preemptions) == (options["slots"] < ROOMY)


@pytest.fixture(scope="module")
def executable() -> Iterator[Executable]:
    loaded, _ = checkpoint()
    made = compile_program("cpu", trace_model(loaded.spec, loaded.tensors), loaded.tensors, KV, 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain_real(executable: Executable) -> dict[str, list[RequestOutput]]:
    return {prompt: run_all(engine_on(executable), real_requests(prompt, titles)[:1]) for prompt, titles in REAL_CASES}


def real_requests(prompt: str, titles: list[str]) -> list[tuple[list[int], SamplingParams]]:
    """The request, and others beside it where that is what makes for preemption."""
    tokens = checkpoint()[1].encode(prompt)
    params = {"seed": 5, "max_tokens": 70 if "preemption" in titles else 40, "ignore_eos": True}
    params |= {name: value for option in OPTIONS if option.title in titles for name, value in option.params.items()}
    return [(tokens, SamplingParams(**params))] * (4 if "preemption" in titles else 1)


@pytest.mark.parametrize(("prompt", "titles"), REAL_CASES, ids=[", ".join(titles) for _, titles in REAL_CASES])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_default_model(
    executable: Executable, plain_real: dict[str, list[RequestOutput]], method: Method, prompt: str, titles: list[str]
) -> None:
    if method.proposer:
        pytest.skip("made from a tiny model")
    rows = {"max_step_rows": 7} if "chunked prefill" in titles else {}
    engine = engine_on(executable, num_blocks=10 if "preemption" in titles else KV.num_blocks, **rows, **method.options)
    for _ in range(2):  # the second time some methods know the answer
        for result in run_all(engine, real_requests(prompt, titles)):
            same(result, plain_real[prompt][0], exact=True)
    stats = engine.stats()
    assert method.happened(stats) and stats.proposer_failures == 0
    assert bool(stats.preemptions) == ("preemption" in titles)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.composability"


def test_the_cases_cover_every_pair() -> None:
    for one in OPTIONS:
        for other in OPTIONS:
            alternatives = {one.title, other.title} == {"greedy", "sampled"}
            assert alternatives != any(one in case and other in case for case in CASES)
