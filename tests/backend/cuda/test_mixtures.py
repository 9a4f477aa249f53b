"""Random mixtures of all kinds of requests over a late device: each has the tokens it has alone.

On a GPU the mixtures also run over its own stream.
"""

from collections.abc import Mapping
from functools import cache
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.stream import HostStream, Stream, make_stream
from headrace.backend_traits import KvDtype
from headrace.batch import ints
from headrace.config import EngineConfig, KvConfig
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
from headrace.model.spec import ExpertSpec, ModelSpec
from headrace.outputs import RequestOutput
from headrace.sampling.pooling import RowSum
from headrace.sampling.sampler import Sampler
from tests.backend.batches import Sequence, batch_of
from tests.backend.cuda.late import LateStream
from tests.calibration_files import EXIT, THRESHOLDS, with_files
from tests.mixtures import (
    ARRIVALS,
    ASKS,
    CLS,
    MIXTURES,
    Arrival,
    mixture_is_right,
    result_of,
)
from tests.tiny import Tensors, mode_program, tiny_engine, tiny_model

EOS = (60,)
BLOCK_SIZE, SLOTS = 4, 240


class Served(NamedTuple):
    """A model, and the options that its engines have."""

    model: tuple[ModelSpec, Tensors]
    kv_dtype: KvDtype
    modes: Mapping[str, Any] = MappingProxyType({})


MODELS = [
    Served(tiny_model(2, layers=1, dim=16, heads=2, kv_heads=1, ffn=16), "bf16"),
    Served(
        tiny_model(
            3,
            layers=2,
            heads=2,
            kv_heads=1,
            window=(9, 0),
            format="Q8_0",
            architecture="mixtral",
            experts=ExpertSpec(4, 2, 32),
        ),
        "int8",
    ),
    Served(
        tiny_model(4, layers=2, dim=16, heads=2, kv_heads=1, ffn=16),
        "f32",
        with_files(
            {
                "attention_window": 9,
                "attention_sinks": 2,
                "activation_sparsity": THRESHOLDS,
                "early_exit": EXIT,
            }
        ),
    ),
]
"""A model of one layer, one with a window, experts, and 8-bit weights and KV, and one in the lossy
modes of the backend.
"""


@cache
def executable(model: int, stream: Stream, prepared: bool) -> CudaExecutable:
    """One executable for many engines, since its plans take longer than a mixture."""
    tiny, kv_dtype, modes = MODELS[model]
    program = mode_program(tiny, EngineConfig(**modes)).with_pooled()
    kv = KvConfig((SLOTS // BLOCK_SIZE,) * len(program.kv_groups), BLOCK_SIZE, kv_dtype)
    made = CudaExecutable(program, tiny[1], kv, torch.bfloat16, stream)
    if prepared:
        made.prepare(16, 4)
    return made


HOST, LATE = HostStream(), LateStream()
STREAMS = [LATE] if is_interpreting() else [LATE, make_stream()]


def engine_over(model: int, made: CudaExecutable, **config: Any) -> Engine:
    tiny, kv_dtype, modes = MODELS[model]
    options = {"slots": SLOTS, "kv_dtype": kv_dtype, **modes, **config}
    return tiny_engine(tiny, "cuda", executable=made, eos_ids=EOS, **options)


@cache
def alone(model: int, which: int) -> RequestOutput:
    """A request by itself, in one piece, each launch read before the next."""
    engine = engine_over(model, executable(model, HOST, False), prefix_cache=False)
    return result_of(engine, ASKS[which])


on_each_stream = pytest.mark.parametrize("stream", STREAMS, ids=lambda s: type(s).__name__)


@on_each_stream
@settings(max_examples=MIXTURES, deadline=None)
@example(
    model=0,
    arrivals=[Arrival(ASKS.index(CLS)), Arrival(0)],
    speed=1,
    seed=0,
    prepared=False,
    multi_step_ms=0,
    max_num_batched_tokens=8,
    max_num_seqs=32,
    prefix_cache=False,
    slots=SLOTS,
    proposer="off",
)
@example(  # three scored rows, and a pooled one after their padding, go through experts
    model=1,
    arrivals=[Arrival(5, gap=1), Arrival(13, is_urgent=True)],
    speed=0,
    seed=0,
    prepared=False,
    multi_step_ms=0,
    max_num_batched_tokens=8,
    max_num_seqs=32,
    prefix_cache=False,
    slots=SLOTS,
    proposer="off",
)
@given(
    model=st.integers(0, len(MODELS) - 1),
    arrivals=ARRIVALS,
    speed=st.sampled_from([0, 0.1, 1]),
    seed=st.integers(0, 1000),
    prepared=st.booleans(),
    multi_step_ms=st.sampled_from([0, 0, 1e6]),
    max_num_batched_tokens=st.sampled_from([5, 8, 9, 64]),
    max_num_seqs=st.sampled_from([2, 32]),
    prefix_cache=st.booleans(),
    slots=st.sampled_from([40, SLOTS]),
    proposer=st.sampled_from(["off", "off", "suffix"]),
)
def test_mixtures_have_the_tokens_of_single_requests(
    stream: Stream,
    model: int,
    arrivals: list[Arrival],
    speed: float,
    seed: int,
    prepared: bool,
    **config: Any,
) -> None:
    """Urgent requests preempt others if there are few slots."""
    LATE.speed, LATE.random = speed, Random(seed)
    engine = engine_over(model, executable(model, stream, prepared), **config)
    expected = [alone(model, arrival.which) for arrival in arrivals]
    mixture_is_right(engine, arrivals, expected, ASKS, {})


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
    expected = Decoding(executable(0, HOST, False)).results(turns, reads_at_once=True)
    LATE.speed, LATE.random = speed, Random(seed)
    results = Decoding(executable(0, stream, False)).results(turns, reads_at_once=False)
    for mine, truth in zip(results, expected, strict=True):
        for one, other in zip(mine, truth, strict=True):
            assert type(one) is type(other) and one is not None
            if isinstance(one, Pooled) and isinstance(other, Pooled):
                np.testing.assert_array_equal(one.total, other.total)
            else:
                assert one == other
