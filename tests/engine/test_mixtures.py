"""Random mixtures of requests in modes with fewer bytes, with adapters, ranks and drafts."""

from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend_traits import KvDtype, traits_of
from headrace.engine.engine import Engine
from headrace.outputs import RequestOutput
from tests.calibration_files import with_files
from tests.composability import MODES, Option
from tests.draft_engines import draft_engine
from tests.drafters import DRAFTERS
from tests.engine.test_adapters import adapter_of
from tests.engine.test_composability import LONG, ROOMY, mode_model
from tests.mixtures import ARRIVALS, ASKS, MIXTURES, Arrival, Ask, mixture_is_right, result_of
from tests.parallel.thread_ranks import compile_two_ranks
from tests.tiny import tiny_engine

FULL = Option("")
ADAPTERS = (0, 1)
"""Low-rank matrices, and weights of the adapter's own too."""
DRAFTS: dict[str, dict[str, Any]] = {
    "first layers": {"how": "self_draft"},
    "best blocks": {"how": "self_draft", "draft_top_blocks": 1},
    "draft model": {"how": "draft_model", "width": 2},
    "other tokens": {"how": "draft_model", "draft_tokens": "shared", "width": 2},
    "few shared tokens": {"how": "draft_model", "draft_tokens": "other"},
    "EAGLE-3": {"how": "draft_model", "width": 2},
    "EAGLE-1": {"how": "draft_model"},
    "MTP": {"how": "draft_model", "depth": 2, "width": 2},
    "Medusa heads": {"how": "medusa", "width": 2},
    "all": {"how": "auto"},
}
LONGER = [
    Ask([*LONG[: 150 + 9 * (i % 4)], *ask.prompt], ask.params, ask.pooling)
    for i, ask in enumerate(ASKS)
]
"""The same requests with prompts that leave blocks out of windows and choices."""


@cache
def plain_engine(mode: Option, kv_dtype: KvDtype) -> Engine:
    """An engine for single requests, which reads the zeros of a ReLU."""
    engine = tiny_engine(
        mode_model(mode),
        "cpu",
        slots=ROOMY,
        kv_dtype=kv_dtype,
        prefix_cache=False,
        release_outside_window=False,
        **with_files(mode.model),
    )
    load(engine, mode, [*ADAPTERS])
    return engine


@cache
def alone(
    mode: Option, kv_dtype: KvDtype, which: int, is_long: bool, adapter: int | None
) -> RequestOutput:
    """A request by itself, in one piece."""
    name = None if adapter is None else str(adapter)
    return result_of(plain_engine(mode, kv_dtype), (LONGER if is_long else ASKS)[which], name)


def load(engine: Engine, mode: Option, adapters: list[int | None]) -> list[str | None]:
    """Load adapters, and return the name of each, or None."""
    for number in {number for number in adapters if number is not None}:
        engine.load_adapter(str(number), adapter_of(mode_model(mode)[0], number))
    return [None if number is None else str(number) for number in adapters]


@settings(max_examples=3 * MIXTURES, deadline=None)
@given(
    mode=st.sampled_from([FULL, *MODES]),
    kv_dtype=st.sampled_from(traits_of("cpu").kv_dtypes),
    arrivals=ARRIVALS,
    lengths=st.lists(st.booleans(), min_size=6, max_size=6),
    adapters=st.lists(st.sampled_from([None, None, *ADAPTERS]), min_size=6, max_size=6),
    drafts=st.sampled_from(["off", "suffix", "lookahead", *DRAFTS]),
    ranks=st.sampled_from([*[1] * 9, 2]),
    batching=st.sampled_from(["inflight", "inflight", "static"]),
    multi_step_ms=st.sampled_from([0, 1e6]),
    max_num_batched_tokens=st.sampled_from([5, 17, 64, 400]),
    max_num_seqs=st.sampled_from([4, 32]),
    prefix_cache=st.booleans(),
    slots=st.sampled_from([480, ROOMY]),
    threads=st.sampled_from([1, 2]),
)
def test_mixtures_have_the_tokens_of_single_requests(
    mode: Option,
    kv_dtype: KvDtype,
    arrivals: list[Arrival],
    lengths: list[bool],
    adapters: list[int | None],
    drafts: str,
    ranks: int,
    **config: Any,
) -> None:
    options = with_files({**mode.model, **mode.engine, "kv_dtype": kv_dtype, **config})
    if ranks > 1:
        options["compile"] = compile_two_ranks
    if drafts in DRAFTS:
        kind = DRAFTERS.get(drafts)
        drafter = kind(mode_model(mode)) if kind else None
        engine = draft_engine(mode_model(mode), drafter=drafter, **DRAFTS[drafts], **options)[0]
    else:
        engine = tiny_engine(mode_model(mode), "cpu", proposer=drafts, **options)
    asks = [
        (LONGER if is_long else ASKS)[arrival.which]
        for arrival, is_long in zip(arrivals, lengths, strict=False)
    ]
    names = load(engine, mode, adapters)
    expected = [
        alone(mode, kv_dtype, arrival.which, lengths[i], adapters[i])
        for i, arrival in enumerate(arrivals)
    ]
    placed = [arrival._replace(which=i) for i, arrival in enumerate(arrivals)]
    mixture_is_right(engine, placed, expected, asks, dict(enumerate(names)))
    engine.close()
