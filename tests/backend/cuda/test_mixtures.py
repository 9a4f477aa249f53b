"""Random mixtures of all kinds of requests over a late device: each has the tokens it has alone.

`HEADRACE_MIXTURES=2000 python -m pytest tests/backend/cuda/test_mixtures.py` is the long form.
On a GPU the mixtures also run over its own stream.
"""

import os
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.backend.cuda import CudaExecutable
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.stream import HostStream, Stream, make_stream
from headrace.batch import ints
from headrace.config import KvConfig
from headrace.engine.engine import Engine
from headrace.logit_ops import (
    Expand,
    Expanded,
    LogitOp,
    LogitOpResult,
    Pool,
    Pooled,
    SampleOp,
    SampleResult,
    Score,
    Ticket,
)
from headrace.model import trace_model
from headrace.outputs import RequestOutput
from headrace.request import Pooling, PoolingParams
from headrace.sampling.pooling import RowSum
from headrace.sampling.sampler import Sampler
from headrace.sampling_params import SamplingParams
from tests.backend.batches import Sequence, batch_of
from tests.backend.cuda.late import LateStream
from tests.engine.test_promise import same
from tests.tiny import drain, tiny_engine, tiny_model

MIXTURES = int(os.environ.get("HEADRACE_MIXTURES", "6"))
EOS = (60,)
MODEL = tiny_model(2, layers=1, dim=16, heads=2, kv_heads=1, ffn=16)
BLOCK_SIZE, SLOTS = 4, 240


class Ask(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    pooling: Pooling | None = None


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
    Ask([1], SamplingParams(), "last"),
    Ask([6, 6, 6, 1, 2, 3], SamplingParams(), "mean"),
    Ask(list(range(20, 29)), SamplingParams(), "cls"),
]


@cache
def executable(stream: Stream, prepared: bool) -> CudaExecutable:
    """One executable for many engines, since its plans take longer than a mixture."""
    spec, tensors = MODEL
    program = trace_model(spec, tensors).with_pooled()
    kv = KvConfig((SLOTS // BLOCK_SIZE,) * len(program.kv_groups), BLOCK_SIZE, "bf16")
    made = CudaExecutable(program, tensors, kv, torch.bfloat16, stream)
    if prepared:
        made.prepare(16, 4)
    return made


HOST, LATE = HostStream(), LateStream()
STREAMS = [LATE] if is_interpreting() else [LATE, make_stream()]


def engine_over(made: CudaExecutable, **config: Any) -> Engine:
    return tiny_engine(MODEL, "cuda", executable=made, eos_ids=EOS, slots=SLOTS, **config)


def add(engine: Engine, ask: Ask) -> str:
    pooling = PoolingParams(pooling=ask.pooling) if ask.pooling else None
    return engine.add(engine.check(ask.prompt, ask.params, pooling=pooling))


@cache
def alone(which: int) -> RequestOutput:
    """A request by itself, in one piece, each launch read before the next."""
    engine = engine_over(executable(HOST, False), prefix_cache=False)
    add(engine, ASKS[which])
    return next(update.result for update in drain(engine) if update.result)


on_each_stream = pytest.mark.parametrize("stream", STREAMS, ids=lambda s: type(s).__name__)


@on_each_stream
@settings(max_examples=MIXTURES, deadline=None)
@example(
    arrivals=[(11, 0), (0, 0)],
    speed=1,
    seed=0,
    prepared=False,
    multi_step_ms=0,
    max_num_batched_tokens=8,
    max_num_seqs=32,
    prefix_cache=False,
)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, len(ASKS) - 1), st.integers(0, 3)), min_size=2, max_size=5
    ),
    speed=st.sampled_from([0, 0.1, 1]),
    seed=st.integers(0, 1000),
    prepared=st.booleans(),
    multi_step_ms=st.sampled_from([0, 0, 1e6]),
    max_num_batched_tokens=st.sampled_from([5, 8, 9, 64]),
    max_num_seqs=st.sampled_from([2, 32]),
    prefix_cache=st.booleans(),
)
def test_mixtures_have_the_tokens_of_single_requests(
    stream: Stream,
    arrivals: list[tuple[int, int]],
    speed: float,
    seed: int,
    prepared: bool,
    **config: Any,
) -> None:
    """Each arrival is a request, and the number of steps before the next one."""
    LATE.speed, LATE.random = speed, Random(seed)
    engine, updates, ids = engine_over(executable(stream, prepared), **config), [], []
    for which, gap in arrivals:
        ids.append(add(engine, ASKS[which]))
        for _ in range(gap):
            updates += engine.step()
    updates += drain(engine)

    results = {update.request_id: update.result for update in updates if update.result}
    for request_id, (which, _) in zip(ids, arrivals, strict=True):
        mine, expected = results[request_id], alone(which)
        same(mine, expected, exact=True)
        np.testing.assert_array_equal(mine.embedding, expected.embedding)
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total and stats.failed_steps == 0


class Turn(NamedTuple):
    """One launch: prompt ops, then the sequences in it and the kinds of their ops."""

    extras: list[str]
    ops: list[tuple[int, str]]
    num_read: int  # older launches that are read after this one


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.2},
]
KINDS = st.sampled_from(["prompt", "sample", "described", "expand", "expand on host"])
TURNS = st.builds(
    Turn,
    extras=st.lists(st.sampled_from(["score", "pool"]), max_size=2),
    ops=st.lists(
        st.tuples(st.integers(0, len(SAMPLERS) - 1), KINDS), min_size=1, unique_by=lambda op: op[0]
    ),
    num_read=st.integers(0, 2),
)


class Decoding:
    """Sequences of one token each, which decode in the launches of turns."""

    def __init__(self, made: CudaExecutable) -> None:
        self._made = made
        size = SLOTS // BLOCK_SIZE // len(SAMPLERS)
        self._sequences = [
            Sequence(list(range(i * size, (i + 1) * size)), BLOCK_SIZE)
            for i in range(len(SAMPLERS))
        ]
        self._samplers = [_native.Sampler(61, [], seed=7, **options) for options in SAMPLERS]
        self._known = [7, 8, 9]
        self._sources: dict[int, tuple[int, int]] = {}  # launch and op of a sequence's last token
        self._tickets: list[Ticket] = []

    def results(self, turns: list[Turn], reads_at_once: bool) -> list[list[LogitOpResult]]:
        unread: list[Ticket] = []
        for turn in turns:
            unread.append(self._launch(turn))
            for _ in range(len(unread) if reads_at_once else min(turn.num_read, len(unread))):
                unread.pop(0).wait()
        return [ticket.wait().values for ticket in self._tickets]

    def _launch(self, turn: Turn) -> Ticket:
        order = [i for i, _ in turn.ops]
        from_op = [self._source(i) for i in order]
        batch = batch_of(
            [self._sequences[i] for i in order],
            [[self._known[i]] for i in order],
            [([], [])] * len(order),
            False,
            len(self._made.kv_groups),
        )._replace(pooled_rows=ints([0]))
        if max(from_op) >= 0:
            batch = batch._replace(token_source=ints(from_op))
        ops = [Score(0, 5, 1) if kind == "score" else Pool(0, 1, RowSum()) for kind in turn.extras]
        for row, (i, kind) in enumerate(turn.ops):
            self._sequences[i].computed += 1
            if kind != "prompt":
                self._sources[i] = len(self._tickets), len(ops)
                ops.append(self._op(kind, row, self._sequences[i].computed, self._samplers[i]))
        self._tickets.append(self._made.launch(batch, ops))
        return self._tickets[-1]

    def _source(self, i: int) -> int:
        """The op of the last launch that samples the token, or -1 after its result is read."""
        launch, op = self._sources.pop(i, (-1, -1))
        if launch == len(self._tickets) - 1 >= 0:
            self._known[i] = 0
            return op
        if launch >= 0:
            value = self._tickets[launch].wait().values[op]
            assert isinstance(value, SampleResult | Expanded)
            self._known[i] = value.tokens[-1]
        return -1

    def _op(self, kind: str, row: int, position: int, sampler: Sampler) -> LogitOp:
        if kind.startswith("expand"):
            width = 2 if kind == "expand on host" else 1
            return Expand(row, position, sampler, 0, width, probabilities=False)
        return SampleOp(row, position, sampler, num_logprobs=1 if kind == "described" else -1)


@on_each_stream
@settings(max_examples=MIXTURES, deadline=None)
@example(
    turns=[
        Turn(["pool"], [(0, "prompt")], 0),
        Turn([], [(0, "sample")], 0),
        Turn([], [(0, "sample")], 0),
    ],
    speed=1,
    seed=0,
)
@given(
    turns=st.lists(TURNS, min_size=2, max_size=6),
    speed=st.sampled_from([0, 0.1, 1]),
    seed=st.integers(0, 1000),
)
def test_results_are_the_same_whenever_launches_are_read(
    stream: Stream, turns: list[Turn], speed: float, seed: int
) -> None:
    """A launch takes its tokens from the last one, sampled by the host or by the device."""
    expected = Decoding(executable(HOST, False)).results(turns, reads_at_once=True)
    LATE.speed, LATE.random = speed, Random(seed)
    results = Decoding(executable(stream, False)).results(turns, reads_at_once=False)
    for mine, truth in zip(results, expected, strict=True):
        for one, other in zip(mine, truth, strict=True):
            assert type(one) is type(other) and one is not None
            if isinstance(one, Pooled) and isinstance(other, Pooled):
                np.testing.assert_array_equal(one.total, other.total)
            else:
                assert one == other
