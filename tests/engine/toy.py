"""A toy model with real bookkeeping: an executable whose KV is a dictionary, and plain decoding of the same model in a loop.
Its logits are a hash of the tokens a row sees, so one wrong token, position or slot changes everything after it.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.batch import Ints, RaggedBatch
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.logit_ops import Done, LogitOp, LogitOpResult, StepResult
from headrace.propose import make_proposers
from headrace.proposer import Proposer
from headrace.request import SamplingParams
from headrace.sampling.host import run_logit_ops, with_tokens
from tests.late import LateExecutable
from tests.sampling.sampler_twin import SamplerTwin
from tests.tiny import TinyVocabulary

VOCAB = 23


def toy_logits(tokens: list[int]) -> NDArray[np.float32]:
    rng = np.random.default_rng(zlib.crc32(bytes(tokens)))
    logits: NDArray[np.float32] = rng.normal(0, 2, VOCAB).astype(np.float32)
    return logits


class ToyExecutable:
    """Checks every batch while it runs it."""

    max_in_flight = 1

    def __init__(self, block_size: int, broken: int = -1, threads: int = 2) -> None:
        self.block_size = block_size
        self._pool = _native.Pool(threads)
        self._values: list[LogitOpResult] = []
        self.broken = broken
        """A token that gives NaN wherever a row sees it."""
        self.kv: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.largest = (0, 0, 0)  # most rows, logit rows and sequences in a step
        self.closed = False

    def launch(self, batch: RaggedBatch, ops: Sequence[LogitOp] = (), *, logits: bool = False, hidden: bool = False) -> Done:
        rows = self.forward(with_tokens(batch, self._values))
        self._values = run_logit_ops(ops, rows, self._pool)
        return Done(StepResult(self._values, rows if logits else None))

    def forward(self, batch: RaggedBatch) -> NDArray[np.float32]:  # [logit rows, vocab]
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two rows write one slot"
        assert list(batch.logit_rows) == sorted(set(batch.logit_rows.tolist()))
        sizes = (len(batch.tokens), len(batch.logit_rows), len(batch.scheduled_len))
        self.largest = tuple(map(max, self.largest, sizes))
        for row in zip(batch.slots.tolist(), batch.positions.tolist(), batch.tokens.tolist(), strict=True):
            self.kv[row[0]] = row[1:]
        rows = [self._logits(batch, seq, row) for seq, row in zip(batch.seq_of, batch.logit_rows, strict=True)]
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def _logits(self, batch: RaggedBatch, seq: int, row: int) -> NDArray[np.float32]:
        start, context, num_scheduled = batch.row_start[seq], int(batch.context_len[seq]), int(batch.scheduled_len[seq])
        assert start <= row < batch.row_start[seq + 1]
        local = int(row - start)
        seen = list(range(context + min(local + 1, num_scheduled)))
        if local >= num_scheduled:
            nodes = range(local - num_scheduled + 1)
            if batch.ancestors is not None:
                nodes = [n for n in nodes if int(batch.ancestors[row, n // 64]) >> n % 64 & 1]
            seen += [context + num_scheduled + node for node in nodes]
        visible = [self.kv[batch.block_table[seq, i // self.block_size] * self.block_size + i % self.block_size] for i in seen]
        assert [position for position, _ in visible] == list(range(len(visible))), "a row sees wrong positions"
        tokens = [token for _, token in visible]
        return np.full(VOCAB, np.nan, np.float32) if self.broken in tokens else toy_logits(tokens)

    def move_slots(self, source: Ints, target: Ints) -> None:
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            self.kv[t] = self.kv.get(s, (-1, -1))

    def close(self) -> None:
        self.closed = True


def toy_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 40,
    broken: int = -1,
    threads: int = 2,
    attention_crossover: float = math.inf,
    proposer: Proposer | Mapping[str, Proposer] | None = None,
    clock: Callable[[], float] = perf_counter,
    late: bool = False,
    **config: Any,
) -> Engine:
    limits = EngineLimits(VOCAB, max_model_len, KvConfig(num_blocks, block_size), attention_crossover=attention_crossover)
    defaults: dict[str, Any] = {"multi_step_ms": 0, "adaptive_speculation": False, "max_draft_tokens": 128}
    options = EngineConfig(**defaults | config)
    proposers = proposer if isinstance(proposer, Mapping) else {"test": proposer} if proposer else make_proposers(options)
    toy = ToyExecutable(block_size, broken, threads)
    return Engine(LateExecutable(toy) if late else toy, TinyVocabulary(VOCAB), limits, options, proposers, clock=clock)


def plain_decoding(prompt: list[int], params: SamplingParams, index: int, max_model_len: int = 40) -> list[int]:
    """Prompt and output of one continuation (no stop conditions but the length), token by token, with the sampler's twin."""
    sampler = SamplerTwin(
        VOCAB,
        prompt,
        seq_index=index,
        seed=params.seed or 0,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
    )
    known = list(prompt)
    while len(known) < min(max_model_len, len(prompt) + (params.max_tokens or max_model_len)):
        known.append(sampler.draw(toy_logits(known), len(known)))
    return known
