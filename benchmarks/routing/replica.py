"""A replica in simulated time: the real engine over an executable without arithmetic.

The clock advances by the predicted time of a step of a model with 8 billion parameters in 16 bits
on a large GPU: weights and context at 3 TB/s, multiply-adds at 400 TFLOPS (the longer of weights
and multiply-adds counts), and 1 ms for the rest. Another speed would scale all times.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backend import expert_table
from headrace.batch import Ints, RaggedBatch
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.logit_ops import Done, LogitOp, StepResult
from headrace.outputs import RequestOutput
from headrace.request import RequestOptions
from headrace.sampling.host import run_logit_ops
from headrace.sampling_params import SamplingParams
from headrace.scaleout.prefix_tree import CacheScope
from headrace.scaleout.replica_speed import ReplicaSpeed
from tests.engine.toy import FULL, toy_groups
from tests.tiny import TinyVocabulary

VOCAB = 32
BLOCK_SIZE = 32
NUM_BLOCKS = 1024
MAX_MODEL_LEN = 8192
CHUNK = 512
MAX_NUM_SEQS = 64
_OTHER_SECONDS = 0.001
_WEIGHT_SECONDS = 16e9 / 3e12
_ROW_SECONDS = 16e9 / 400e12
_CONTEXT_SECONDS = 131_072 / 3e12
_TYPICAL_CONTEXT = 1500


def step_seconds(rows: int, context: int) -> float:
    """Seconds of a step, by its rows and its total context."""
    return _OTHER_SECONDS + max(_WEIGHT_SECONDS, rows * _ROW_SECONDS) + context * _CONTEXT_SECONDS


def fitted_speed() -> ReplicaSpeed:
    """The speed of a replica, from an empty step and a full chunk."""
    empty, full = step_seconds(1, 0), step_seconds(CHUNK, 0)
    return ReplicaSpeed(
        step_seconds=empty,
        row_seconds=(full - empty) / CHUNK,
        sequence_seconds=_TYPICAL_CONTEXT * _CONTEXT_SECONDS,
        chunk_size=CHUNK,
        max_num_seqs=MAX_NUM_SEQS,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """An executable that takes the time of a step without arithmetic: all tokens are equally
    likely.
    """

    max_in_flight = 1

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def launch(self, batch: RaggedBatch, ops: Sequence[LogitOp], **_: bool) -> Done:
        self._clock.now += step_seconds(len(batch.tokens), int(batch.context_len.sum()))
        return Done(
            StepResult(run_logit_ops(ops, np.zeros((len(batch.logit_rows), VOCAB), np.float32)))
        )

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        """Does nothing."""

    def expert_loads(self) -> NDArray[np.int64]:
        return expert_table([])

    def close(self) -> None:
        """Does nothing."""


class News(NamedTuple):
    """The requests that got their first token in a step, and the requests that ended."""

    end: float
    first_tokens: list[str]
    results: list[RequestOutput]


class Replica:
    """An engine, and the end of its running step."""

    def __init__(self) -> None:
        self._clock = Clock()
        config = EngineConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=CHUNK + MAX_NUM_SEQS,
            chunked_prefill_size=CHUNK,
            multi_step_ms=0,
        )
        limits = EngineLimits(
            VOCAB, MAX_MODEL_LEN, KvConfig((NUM_BLOCKS,), BLOCK_SIZE), toy_groups(FULL)
        )
        self._engine = Engine(
            Timed(self._clock), TinyVocabulary(VOCAB), limits, config, clock=self._clock
        )  # type: ignore[arg-type]
        self._waiting = set[str]()
        self.is_busy = False
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is running or waiting."""
        return self._engine.has_work

    def add(
        self, now: float, request_id: str, prompt: list[int], num_tokens: int, scope: CacheScope
    ) -> None:
        """Queue a request at a time."""
        self._clock.now = now
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self._engine.add_request(
            prompt, params, RequestOptions(cache_salt=scope[0]), request_id=request_id
        )
        self._waiting.add(request_id)

    def step(self, now: float) -> News:
        """Run a step that starts at this time, and return the results at its end."""
        self._clock.now = now
        updates = self._engine.step()
        results = [update.result for update in updates if update.result]
        for result in results:
            if result.error:
                raise result.error
        begun = {update.request_id for update in updates if update.token_ids} & self._waiting
        self._waiting -= begun
        return News(self._clock.now, sorted(begun), results)
