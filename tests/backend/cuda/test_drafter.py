"""EAGLE-3 drafts on the device: equal to drafts by way of the host, however late the device is."""

from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.drafter import CudaDrafter
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.kept_rows import RowStore
from headrace.backend.cuda.stream import HostStream, Stream, make_stream
from headrace.backend.cuda.ticket import CudaTicket, Slot
from headrace.backend.cuda.workspace import Workspace
from headrace.checkpoint.drafter import Drafter
from headrace.config import KvConfig
from headrace.loader import drafts
from headrace.model import trace_model
from headrace.outputs import RequestOutput
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import eagle
from headrace.speculation.proposers.eagle import DrafterPrograms
from headrace.structured_outputs import StructuredOutputs
from tests.backend.cuda.addresses import checked_addresses
from tests.backend.cuda.late import LateStream
from tests.draft_engines import draft_engine
from tests.drafters import random_drafter
from tests.engine.test_promise import Ask, same
from tests.mixtures import ARRIVALS, ASKS, MIXTURES, Arrival, mixture_is_right, result_of
from tests.speculation.test_eagle import Recorder
from tests.tiny import run_all, tiny_engine, tiny_model

MODEL = tiny_model(4, layers=2, dim=16, heads=4, kv_heads=2, ffn=16)
TAPS = (0, 1, 1)
GREEDY: list[Ask] = [
    ([7, 8, 9, 7, 8], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)),
    ([3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)),
]
SAMPLED: list[Ask] = [
    ([7, 8, 9], SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=6)),
    (list(range(1, 22)), SamplingParams(n=2, seed=7, max_tokens=4, ignore_eos=True)),
    ([1, 5], SamplingParams(seed=3, max_tokens=5, top_k=9, min_p=0.01, logit_bias={3: 1.5})),
    (
        [9, 9],
        SamplingParams(seed=3, max_tokens=6, repetition_penalty=1.3, presence_penalty=0.5),
    ),
]
STRUCTURED: list[Ask] = [
    (
        [5],
        SamplingParams(
            seed=1, max_tokens=6, structured_outputs=StructuredOutputs(regex="[a-c]{2,5}")
        ),
    ),
    ([6, 5], SamplingParams(temperature=0, max_tokens=4, min_tokens=3)),
]
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "structured": STRUCTURED}


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "DRAFTS_ON_DEVICE", True)


def drafted(
    asks: list[Ask], drafter: Drafter, stream: Stream | None = None, **options: Any
) -> tuple[list[list[int]], list[RequestOutput]]:
    """The drafts of all steps, and the results."""

    def compile(
        backend: str, program: Program, tensors: Mapping[str, StoredTensor], kv: KvConfig, *_: Any
    ) -> CudaExecutable:
        return CudaExecutable(program, tensors, kv, torch.bfloat16, stream or HostStream())

    engine, _ = draft_engine(
        MODEL, "draft_model", "cuda", drafter=drafter, compile=compile, depth=3, **options
    )
    guard = engine._speculation._guards["draft_model"]
    guard._proposer = recorder = Recorder(guard._proposer)
    results = run_all(engine, asks)
    assert engine.stats().drafted > 0 and engine.stats().proposer_failures == 0
    return recorder.drafts, results


def by_way_of_the_host(
    monkeypatch: pytest.MonkeyPatch, asks: list[Ask], drafter: Drafter, **options: Any
) -> tuple[list[list[int]], list[RequestOutput]]:
    with monkeypatch.context() as patched:
        patched.setattr(drafts, "DRAFTS_ON_DEVICE", False)
        return drafted(asks, drafter, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [0, 20], ids=["all tokens", "some tokens"])
def test_drafts_on_the_device_are_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch, kind: str, vocab: int
) -> None:
    """They also change no token of plain decoding."""
    asks, drafter = KINDS[kind], random_drafter(MODEL, vocab=vocab, taps=TAPS)
    mine, results = drafted(asks, drafter)
    expected, _ = by_way_of_the_host(monkeypatch, asks, drafter)
    assert mine == expected and any(map(len, mine))
    plain = tiny_engine(MODEL, "cuda", kv_dtype="f32")
    for one, other in zip(results, run_all(plain, asks), strict=True):
        same(one, other, exact=True)


def test_siblings_on_the_device_change_no_token() -> None:
    """The host draws siblings, from logits of some tokens, and waits for each depth."""
    mine, results = drafted(GREEDY, random_drafter(MODEL, vocab=20, taps=TAPS), width=2)
    assert max(map(len, mine)) > 3
    plain = tiny_engine(MODEL, "cuda", kv_dtype="f32")
    for one, other in zip(results, run_all(plain, GREEDY), strict=True):
        same(one, other, exact=True)


@pytest.mark.parametrize("speed", [0, 0.2])
def test_a_late_device_drafts_the_same(speed: float) -> None:
    drafter, stream = random_drafter(MODEL, vocab=20, taps=TAPS), LateStream()
    stream.speed, stream.random = speed, Random(1)
    late, results = drafted(SAMPLED[:2], drafter, stream)
    mine, expected = drafted(SAMPLED[:2], drafter)
    assert late == mine and stream.late > 0
    for one, other in zip(results, expected, strict=True):
        same(one, other, exact=True)


@pytest.mark.skipif(not is_interpreting(), reason="the interpreter's own memory check")
def test_chains_that_end_read_no_other_memory() -> None:
    """Filters, biases and penalties of a chain that has ended run on no row."""
    first = SamplingParams(seed=3, max_tokens=5, top_k=9, logit_bias={3: 1.5}, ignore_eos=True)
    second = SamplingParams(seed=4, max_tokens=3, top_p=0.9, ignore_eos=True)
    with checked_addresses():
        drafted([([1, 5], first), ([9], second)], random_drafter(MODEL, taps=TAPS))


def test_the_host_reads_a_chain_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It queues all depths, and then waits."""
    calls: list[str] = []

    def record(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def recorded(*args: Any) -> Any:
            calls.append(name)
            return call(*args)

        monkeypatch.setattr(owner, name, recorded)

    for owner, name in ((CudaDrafter, "start"), (CudaDrafter, "follow"), (CudaTicket, "wait")):
        record(owner, name)
    drafted(GREEDY[:1], random_drafter(MODEL, taps=TAPS))
    chain = ["start", "follow", "follow", "wait", "wait", "wait"]
    first = calls.index("start")
    assert calls[first : first + len(chain)] == chain


def test_rows_on_the_device_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts and many waiting rows, in memory that grows and is used again."""
    monkeypatch.setattr(eagle, "_MAX_WAITING_ON_DEVICE", 2)
    stores: list[RowStore] = []
    make = RowStore.__init__

    def record(store: RowStore, *args: Any) -> None:
        stores.append(store)
        make(store, *args)

    monkeypatch.setattr(RowStore, "__init__", record)
    drafter = random_drafter(MODEL, taps=TAPS)
    asks: list[Ask] = [(list(range(1, 50)), GREEDY[0][1]), *GREEDY]
    mine, _ = drafted(asks, drafter)
    assert mine == by_way_of_the_host(monkeypatch, asks, drafter)[0]
    (store,) = stores
    assert store.num_kept == 0


def test_a_store_keeps_rows_until_they_are_dropped() -> None:
    stream: Stream = LateStream() if is_interpreting() else make_stream()
    slot = Slot()
    store = RowStore(3, stream, Workspace())
    first = torch.arange(12.0, device=DEVICE).reshape(4, 3)
    step = store.keep(first, 3, slot)
    kept = [step[2], step[0]]
    del step
    assert store.num_kept == 2
    # Far more rows than the store has room for: it grows.
    many = torch.arange(3000.0, device=DEVICE).reshape(1000, 3)
    others = store.keep(many, 1000, Slot())
    out = torch.zeros(4, 3, device=DEVICE)
    store.read(out, kept, slot := Slot())
    del kept
    assert store.num_kept == 1000
    stream.catch_up()
    assert out[:2].tolist() == [[6, 7, 8], [0, 1, 2]]
    del others
    assert store.num_kept == 0


EOS = (60,)
LATE = LateStream()


class Served(NamedTuple):
    """A compiled model with a drafter, for many engines."""

    executable: CudaExecutable
    programs: DrafterPrograms


@cache
def served(stream: Stream, is_prepared: bool) -> Served:
    spec, tensors = MODEL
    program = trace_model(spec, tensors).with_pooled().with_taps(TAPS)
    kv = KvConfig((60,), 4, "bf16")
    made = CudaExecutable(program, tensors, kv, torch.bfloat16, stream)
    drafter = random_drafter(MODEL, vocab=20, taps=TAPS)
    programs = drafts.compile_drafter(drafter, spec, made, kv, 3)
    if is_prepared:
        for each in (made, programs.from_target.executable, programs.from_itself.executable):
            each.prepare(16, 4)
    return Served(made, programs)


@cache
def alone(which: int) -> RequestOutput:
    """A request by itself, in one piece, without drafts."""
    made = served(HostStream(), False).executable
    engine = tiny_engine(
        MODEL, "cuda", executable=made, eos_ids=EOS, slots=240, kv_dtype="bf16", prefix_cache=False
    )
    return result_of(engine, ASKS[which])


@settings(max_examples=max(2, MIXTURES // 2), deadline=None)
@given(
    arrivals=ARRIVALS,
    speed=st.sampled_from([0, 0.1, 1]),
    seed=st.integers(0, 1000),
    is_prepared=st.booleans(),
    width=st.sampled_from([1, 1, 2]),
    adaptive_speculation=st.booleans(),
    max_num_batched_tokens=st.sampled_from([5, 9, 64]),
    max_num_seqs=st.sampled_from([2, 32]),
    prefix_cache=st.booleans(),
    slots=st.sampled_from([40, 240]),
)
def test_mixtures_with_a_drafter_have_the_tokens_of_single_requests(
    arrivals: list[Arrival], speed: float, seed: int, is_prepared: bool, width: int, **config: Any
) -> None:
    LATE.speed, LATE.random = speed, Random(seed)
    model = served(LATE, is_prepared)
    proposer = eagle.EagleProposer(
        model.programs, 3, width, probabilities=False, prefix_cache=config["prefix_cache"]
    )
    engine = tiny_engine(
        MODEL,
        "cuda",
        executable=model.executable,
        proposer=proposer,
        eos_ids=EOS,
        kv_dtype="bf16",
        **config,
    )
    mixture_is_right(engine, arrivals, [alone(arrival.which) for arrival in arrivals], ASKS, {})
