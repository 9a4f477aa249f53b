"""Memory waste on the trace, by block size and batching: the share of used slots without KV.

Prompts in prefill will fill some of these slots. Slots beyond all known tokens are fragmentation:
partly empty last blocks, and reservations of static batches.

The scheduler and the block pool are real, with at most 32 sequences. The executable computes
nothing, because waste depends on lengths alone. So blocks of 16 can be counted too, which the cpu
backend does not support.
"""

from collections.abc import Sequence

import numpy as np
from bench import Bench, serve
from numpy.typing import NDArray
from workload import MAX_OUTPUT, MAX_PROMPT, NUM_REQUESTS, WORDS, trace

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
    """An executable without arithmetic: all tokens are equally likely."""

    max_in_flight = 1

    def launch(self, batch: RaggedBatch, ops: Sequence[LogitOp], **_: bool) -> Done:
        return Done(
            StepResult(run_logit_ops(ops, np.zeros((len(batch.logit_rows), _VOCAB), np.float32)))
        )

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        """Does nothing."""

    def expert_loads(self) -> NDArray[np.int64]:
        return expert_table([])

    def close(self) -> None:
        """Does nothing."""


def engine_of(batching: str, block_size: int) -> Engine:
    longest = MAX_PROMPT + MAX_OUTPUT
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
        ["batching", ">block size", ">waste", ">waste beyond known tokens", "target of waste"],
        rows,
    )
