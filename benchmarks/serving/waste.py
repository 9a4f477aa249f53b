"""Memory waste on the trace, by block size and batching: slots in use that hold no KV, as a share
of those in use.

Some of these are about to be filled, by prompts that have their blocks and are still being read;
what lies beyond all known tokens is fragmentation: last blocks part empty, and what a static batch
reserves.

The scheduler and the block pool are the engine's own, with 32 sequences at most; the executable
computes nothing, since what is counted depends on lengths alone. So blocks of 16 can be counted
too, which the cpu backend does not have.
"""

from collections.abc import Sequence

import numpy as np
from bench import Bench, serve
from numpy.typing import NDArray
from workload import MOST_OUTPUT, MOST_PROMPT, NUM_REQUESTS, WORDS, trace

from headrace.backend import expert_table
from headrace.batch import Ints, RaggedBatch
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.logit_ops import Done, LogitOp, StepResult
from headrace.sampling.host import run_logit_ops
from tests.engine.toy import FULL, toy_groups
from tests.tiny import TinyVocabulary

MAX_NUM_SEQS = 32
_VOCAB = 16
TARGET = 0.04


class Nothing:
    """An executable that computes nothing: every token is as likely as any other."""

    max_in_flight = 1

    def launch(self, batch: RaggedBatch, ops: Sequence[LogitOp], **_: bool) -> Done:
        return Done(
            StepResult(run_logit_ops(ops, np.zeros((len(batch.logit_rows), _VOCAB), np.float32)))
        )

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        """There is nothing to move."""

    def expert_loads(self) -> NDArray[np.int64]:
        return expert_table([])

    def close(self) -> None:
        """There is nothing to close."""


def engine_of(batching: str, block_size: int) -> Engine:
    longest = MOST_PROMPT + MOST_OUTPUT
    kv = KvConfig((MAX_NUM_SEQS * -(-longest // block_size),), block_size)
    config = EngineConfig(batching=batching, max_num_seqs=MAX_NUM_SEQS, multi_step_ms=0)
    return Engine(
        Nothing(),
        TinyVocabulary(_VOCAB),
        EngineLimits(_VOCAB, longest, kv, toy_groups(FULL)),
        config,
    )


def waste(bench: Bench) -> None:
    asks = trace(_VOCAB, 40 if bench.quick else NUM_REQUESTS)
    tokens = sum(len(ask.prompt) + ask.num_tokens for ask in asks) / len(asks)
    rows = []
    for batching, block_size in (("inflight", 16), ("inflight", 32), ("static", 32)):
        served = serve(engine_of(batching, block_size), asks, f"{batching}, blocks of {block_size}")
        target = (
            f"< {TARGET:.0%}" + (", missed" if served.waste >= TARGET else "")
            if batching == "inflight"
            else ""
        )
        facts = {
            "batching": batching,
            "block_size": block_size,
            "waste": served.waste,
            "fragmentation": served.fragmentation,
        }
        rows.append(
            (
                facts,
                [
                    batching,
                    str(block_size),
                    f"{100 * served.waste:.1f} %",
                    f"{100 * served.fragmentation:.1f} %",
                    target,
                ],
            )
        )
    title = (
        f"memory waste: {len(asks)} requests, {WORDS}; {tokens:,.0f} tokens each in the mean; "
        "mean over steps"
    )
    bench.table(
        "waste",
        title,
        ["batching", ">block size", ">waste", ">of it beyond what is known", "target of waste"],
        rows,
    )
