"""Every pair of a method and an option gives the tokens and log-probabilities of plain decoding,
bit for bit.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from headrace.backend import Executable, compile_program
from headrace.engine.engine import Engine
from headrace.loader.exit_map import ExitMap
from headrace.model import trace_model
from headrace.model.spec import EarlyExit, ModelSpec
from headrace.outputs import RequestOutput
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from tests.calibration_files import EXIT_LAYERS, with_files
from tests.composability import (
    ADAPTERS,
    CASES,
    FEW_BLOCKS,
    METHODS,
    MODE_CASES,
    OPTIONS,
    PAGE,
    RANKS,
    REAL_CASES,
    SEARCH,
    Case,
    Method,
    Option,
    mode_title,
    page,
    title,
)
from tests.draft_engines import draft_engine
from tests.drafters import DRAFTERS
from tests.engine.test_adapters import adapter_of
from tests.engine.test_promise import Ask, same
from tests.engine.test_promise_real import KV, checkpoint, engine_on
from tests.parallel.thread_ranks import compile_two_ranks
from tests.tiny import Tensors, drain, run_all, tiny_engine, tiny_model

PROMPTS = [[7, 8, 9] * 5, [2, 4] * 9, [*range(1, 30), *range(1, 12)], [3]]
LONGEST = 2
"""Of these: longer than a block, and so a hit when it comes again."""
LONG = [int(token) for token in np.random.default_rng(1).integers(1, 60, 170)]
"""A prompt with blocks outside windows and top blocks."""
MAX_TOKENS = 44
ROOMY = 3200


def merged(case: Case, what: str) -> dict[str, Any]:
    return {name: value for option in case for name, value in getattr(option, what).items()}


@cache
def model(format: str) -> Any:
    return tiny_model(seed=3, format=format)


def parts(
    case: Case,
) -> tuple[tuple[Any, Tensors], list[tuple[list[int], SamplingParams]], dict[str, Any]]:
    """Return the model, the requests, and the options of both engines."""
    options = merged(case, "model")
    made = model(options.pop("format", "F32"))
    params = {"seed": 5, "max_tokens": MAX_TOKENS, **merged(case, "params")}
    return made, [(prompt, SamplingParams(**params)) for prompt in PROMPTS], options


@cache
def plain(case: Case) -> list[RequestOutput]:
    made, requests, options = parts(case)
    return [
        run_all(tiny_engine(made, "cpu", slots=ROOMY, **options), [request])[0]
        for request in requests
    ]


@pytest.mark.parametrize("case", CASES, ids=title)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_methods_compose_on_a_tiny_model(method: Method, case: Case) -> None:
    made, requests, options = parts(case)
    options = {"slots": ROOMY, **options, **method.options, **merged(case, "engine")}
    engine = engine_of(method, made, options)
    rounds = [range(len(PROMPTS))] + [range(LONGEST, LONGEST + 1)] * (2 * options["prefix_cache"])
    for which in rounds:
        for i, result in zip(which, run_all(engine, [requests[i] for i in which]), strict=True):
            same(result, plain(case)[i], exact=True)
    stats = engine.stats()
    assert method.happened(stats) and stats.proposer_failures == 0
    assert stats.blocks_free == stats.blocks_total
    assert bool(stats.preemptions) == (options["slots"] < ROOMY)
    scored = (
        requests[0][1].prompt_logprobs is not None
    )  # the rows that give them cannot come from the cache
    assert scored or bool(stats.cached_tokens) == options["prefix_cache"]


def engine_of(
    method: Method, made: tuple[Any, Tensors], options: dict[str, Any], mode: Option | None = None
) -> Engine:
    if method.draft:
        draft = with_files(method.draft)
        if format := draft.pop("format", ""):
            # Weights in fewer bytes draft with all layers, or with those before an exit.
            layers = EXIT_LAYERS if options.get("early_exit") else made[0].num_layers
            weights = mode_model(mode, format) if mode else model(format)
            draft |= {"weights": weights, "layers": range(layers)}
        if kind := draft.pop("drafter", ""):
            draft["drafter"] = DRAFTERS[kind](made)
        return draft_engine(made, **{"kv_dtype": "bf16", **options, **draft})[0]
    if method.options["proposer"] == "auto" and options.get("early_exit"):
        auto = {"how": "auto", "enabled": ["self_draft"]}
        own = {name: value for name, value in options.items() if name != "proposer"}
        return draft_engine(made, **{"kv_dtype": "bf16", **own, **auto})[0]
    return tiny_engine(made, "cpu", **options)


@cache
def mode_model(mode: Option, format: str = "") -> tuple[ModelSpec, Tensors]:
    """A model whose context holds `LONG`, with the map of an early exit."""
    shape = {**mode.shape, "format": format} if format else mode.shape
    spec, tensors = tiny_model(seed=3, context=256, **shape)
    rng = np.random.default_rng(1)
    weight = np.eye(spec.dim) + 0.1 * rng.standard_normal((spec.dim, spec.dim))
    exit_map = ExitMap.of(weight.astype(np.float32), np.ones(spec.dim, np.float32))
    return spec, {**tensors, **exit_map.tensors(EarlyExit(EXIT_LAYERS, 0.0).map_name)}


def mode_requests(case: Case) -> list[Ask]:
    params = SamplingParams(**{"seed": 5, "max_tokens": MAX_TOKENS, **merged(case, "params")})
    search = SamplingParams(beam_width=4, n=4, max_tokens=20)
    return [
        (LONG, params),
        (PROMPTS[0], params),
        (PROMPTS[1], search if SEARCH in case else params),
    ]


def run_in_mode(
    engine: Engine, mode: Option, case: Case, which: Sequence[int]
) -> list[RequestOutput]:
    """The results of some of the requests; with adapters, the first two have one each."""
    names = ["0", "1", None] if ADAPTERS in case else [None] * 3
    for name in names:
        if name and name not in engine.stats().adapters:
            engine.load_adapter(name, adapter_of(mode_model(mode)[0], int(name)))
    requests = mode_requests(case)
    ids = [engine.add_request(*requests[i], RequestOptions(adapter=names[i])) for i in which]
    results = {update.request_id: update.result for update in drain(engine) if update.result}
    return [results[request_id] for request_id in ids]


@cache
def plain_in_mode(mode: Option, case: Case) -> list[RequestOutput]:
    options = with_files({**mode.model, **merged(case, "model")})
    return [
        run_in_mode(tiny_engine(mode_model(mode), "cpu", slots=ROOMY, **options), mode, case, [i])[
            0
        ]
        for i in range(3)
    ]


@pytest.mark.parametrize(("method", "mode", "case"), MODE_CASES, ids=map(mode_title, MODE_CASES))
def test_methods_compose_in_modes(method: Method, mode: Option, case: Case) -> None:
    options = {**mode.model, **mode.engine, **merged(case, "model"), **merged(case, "engine")}
    options = with_files({"slots": ROOMY, **options, **method.options})
    if RANKS in case:
        options["compile"] = compile_two_ranks
    engine = engine_of(method, mode_model(mode), options, mode)
    rounds = [range(3)] + [range(1)] * options.get("prefix_cache", False)
    for which in rounds:
        for i, result in zip(which, run_in_mode(engine, mode, case, which), strict=True):
            same(result, plain_in_mode(mode, case)[i], exact=True)
    stats = engine.stats()
    # Lookahead finds no repeated tokens in some of these outputs.
    assert method.happened(stats) or method.title == "lookahead"
    assert stats.proposer_failures == 0 and stats.blocks_free == stats.blocks_total
    # Right drafts may end a request before another needs its blocks.
    is_quick = method.title.startswith("auto")
    assert bool(stats.preemptions) == (FEW_BLOCKS in case) or is_quick
    engine.close()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_methods_compose_with_beam_search(method: Method) -> None:
    """A search and drafting requests in one batch give the results that they give alone."""
    made = model("Q4_0")
    params = [
        SamplingParams(beam_width=4, n=4, max_tokens=20),
        SamplingParams(seed=5, max_tokens=MAX_TOKENS, logprobs=1),
    ]
    requests = [(prompt, each) for prompt in PROMPTS for each in params]
    expected = [run_all(tiny_engine(made, "cpu"), [request])[0] for request in requests]
    engine = engine_of(method, made, {"slots": ROOMY, **method.options})
    for result, other in zip(run_all(engine, requests), expected, strict=True):
        same(result, other, exact=True)
        assert not (result.drafts and len(result.outputs) > 1), "a search was given drafts"
    stats = engine.stats()
    assert (
        method.happened(stats)
        and stats.proposer_failures == 0
        and stats.blocks_free == stats.blocks_total
    )


@pytest.fixture(scope="module")
def executable() -> Iterator[Executable]:
    loaded, _ = checkpoint()
    made = compile_program("cpu", trace_model(loaded.spec, loaded.tensors), loaded.tensors, KV, 1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain_real(executable: Executable) -> dict[str, list[RequestOutput]]:
    return {
        prompt: run_all(engine_on(executable), real_requests(prompt, titles)[:1])
        for prompt, titles in REAL_CASES
    }


def real_requests(prompt: str, titles: list[str]) -> list[tuple[list[int], SamplingParams]]:
    """Return the request; for preemption, with other requests."""
    tokens = checkpoint()[1].encode(prompt)
    params = {"seed": 5, "max_tokens": 45 if "preemption" in titles else 40, "ignore_eos": True}
    params |= {
        name: value
        for option in OPTIONS
        if option.title in titles
        for name, value in option.params.items()
    }
    return [(tokens, SamplingParams(**params))] * (4 if "preemption" in titles else 1)


@pytest.mark.parametrize(
    ("prompt", "titles"), REAL_CASES, ids=[", ".join(titles) for _, titles in REAL_CASES]
)
@pytest.mark.parametrize(
    "method", [method for method in METHODS if not method.draft], ids=lambda method: method.title
)
def test_methods_compose_on_the_default_model(
    executable: Executable,
    plain_real: dict[str, list[RequestOutput]],
    method: Method,
    prompt: str,
    titles: list[str],
) -> None:
    rows = {"max_num_batched_tokens": 7} if "chunked prefill" in titles else {}
    # Equal requests would share their blocks, and none would have to be preempted.
    blocks: dict[str, Any] = (
        {"num_blocks": 7, "prefix_cache": False} if "preemption" in titles else {}
    )
    engine = engine_on(executable, **blocks, **rows, **method.options)
    for _ in range(2):  # the second time some methods know the answer
        for result in run_all(engine, real_requests(prompt, titles)):
            same(result, plain_real[prompt][0], exact=True)
    stats = engine.stats()
    assert method.happened(stats) and stats.proposer_failures == 0
    assert bool(stats.preemptions) == ("preemption" in titles)


def test_the_composability_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.composability"


def test_the_cases_cover_every_pair_of_methods() -> None:
    for one in OPTIONS:
        for other in OPTIONS:
            alternatives = {one.title, other.title} == {"greedy", "sampled"}
            assert alternatives != any(one in case and other in case for case in CASES)
