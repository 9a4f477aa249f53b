"""Attention over a paged KV cache: decode compared with memory bandwidth, prefill with bf16
arithmetic.

A decode step reads the keys and values of its contexts once for all heads of a group. Each case
alternates between many contexts, so that none is in a cache: first with the blocks of a sequence in
a row, as the pool allocates them, then with shuffled blocks. A context includes the row's own
token.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, get_args

import numpy as np
from harness import Bench, Column, Rounds, main, verdict
from native import VOCAB, AttentionPlan, ragged

from headrace.backend_traits import KvDtype
from headrace.batch import Ints, RaggedBatch
from headrace.program import ops
from headrace.program.kv import KvGroup, KvLayout, number_bytes, token_bytes
from headrace.program.op import Kind, StepSize, Value
from headrace.quant.kv import BLOCK_SIZE

KV_HEADS = {1: 8, 3: 3, 4: 8, 8: 8}
"""By query heads per KV head; the default model has 3."""
HEAD_DIMS = (64, 128)
CONTEXTS = (128, 512, 2048, 8192)
BATCHES = (1, 4, 16, 32)
PROMPTS = (128, 512, 2048)
MAX_BYTES = 2 << 30
TARGET = 0.85
"""Min share of the bandwidth in decode."""
DECODE_COLUMNS = (
    Column("context", "context"),
    Column("batch", "batch"),
    Column("microseconds", "us", ",.1f"),
    Column("kv_gb_s", "KV GB/s", ".1f"),
    Column("roof_share", "of the roof", ".0%"),
    Column("target", "target"),
    Column("shuffled_share", "blocks shuffled", ".0%"),
)
PREFILL_COLUMNS = (
    Column("rows", "rows"),
    Column("microseconds", "us", ",.0f"),
    Column("g_operations_s", "G operations/s", ",.0f"),
    Column("roof_share", "of the roof", ".0%"),
    Column("shuffled_share", "blocks shuffled", ".0%"),
)


class Case(NamedTuple):
    """A kind of step: (context before the step, rows) of each sequence."""

    seqs: tuple[tuple[int, int], ...]
    shuffled: bool


class Shape(NamedTuple):
    """Heads and KV of a layer."""

    group: int
    head_dim: int
    kv_dtype: KvDtype

    @property
    def kv_heads(self) -> int:
        return KV_HEADS[self.group]

    @property
    def kv_group(self) -> KvGroup:
        return KvGroup((0,), KvLayout(self.kv_heads, self.head_dim, self.head_dim))

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and value of a token, for all heads."""
        return token_bytes((self.kv_group,), self.kv_dtype)

    def op(self) -> ops.Attention:
        """The op, whose costs are the limits."""
        heads = self.group * self.kv_heads
        value = Value(0, heads * self.head_dim, "step")
        return ops.Attention(
            value, value, 0, heads, self.kv_heads, self.head_dim, self.head_dim, self.head_dim**-0.5
        )

    def size(self, case: Case) -> StepSize:
        return StepSize(case.seqs, 0, number_bytes((self.kv_group,), self.kv_dtype))


def attention(bench: Bench) -> None:
    """Two tables for each shape of a layer."""
    if bench.quick:
        return measure(bench, Shape(3, 64, "bf16"), (64,), (1, 2), (64,))
    for group, head_dim, kv_dtype in product(KV_HEADS, HEAD_DIMS, get_args(KvDtype)):
        measure(bench, Shape(group, head_dim, kv_dtype), CONTEXTS, BATCHES, PROMPTS)


def measure(
    bench: Bench,
    shape: Shape,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    prompts: tuple[int, ...],
) -> None:
    """Decode and prefill of one shape."""
    sizes = [
        (context, batch)
        for context, batch in product(contexts, batches)
        if context * batch * shape.token_bytes <= MAX_BYTES
    ]
    decode = [((context - 1, 1),) * batch for context, batch in sizes]
    prefill = [((0, rows),) for rows in prompts]
    cases = [Case(seqs, shuffled) for seqs in (*decode, *prefill) for shuffled in (False, True)]
    most_tokens = max(max(_tokens(case) for case in cases), bench.cold_bytes // shape.token_bytes)
    num_blocks = -(-most_tokens // BLOCK_SIZE)
    plan = AttentionPlan(
        bench.threads,
        shape.group * shape.kv_heads,
        shape.kv_heads,
        shape.head_dim,
        num_blocks,
        shape.kv_dtype,
    )
    steps = {
        case: list(_steps(case, num_blocks, bench.cold_bytes // shape.token_bytes))
        for case in cases
    }
    kernels = {case: bench.busy(lambda b=b: plan.seconds(b) / len(b)) for case, b in steps.items()}
    kind: Kind = "f32" if shape.kv_dtype == "f32" else "bf16"
    rounds = bench.rounds({"bandwidth": bench.bandwidth(), "rate": bench.rate(kind)} | kernels)
    name = (
        f"{shape.group} heads a KV head ({shape.kv_heads}), head_dim {shape.head_dim}, "
        f"{shape.kv_dtype}"
    )
    _report_decode(bench, name, shape, rounds, decode)
    _report_prefill(bench, name, shape, rounds, prefill)


def _tokens(case: Case) -> int:
    return sum(context + rows for context, rows in case.seqs)


def _steps(case: Case, num_blocks: int, min_tokens: int) -> Iterator[RaggedBatch]:
    """Steps of the case on different blocks, until they read `min_tokens` tokens or all blocks
    once.
    """
    order: Ints = np.arange(num_blocks, dtype=np.int32)
    if case.shuffled:
        order = np.random.default_rng(4).permutation(order)
    tables = _tokens(case) // BLOCK_SIZE
    count = (
        1
        if case.seqs[0][0] == 0
        else min(num_blocks // tables, math.ceil(min_tokens / _tokens(case)))
    )
    for step in range(count):
        blocks = order[step * tables : (step + 1) * tables]
        yield ragged(case.seqs, blocks.reshape(len(case.seqs), -1), VOCAB, False)


def _report_decode(
    bench: Bench, name: str, shape: Shape, rounds: Rounds, decode: list[tuple[tuple[int, int], ...]]
) -> None:
    table = []
    for seqs in decode:
        case = Case(seqs, False)
        nbytes = shape.op().bytes(shape.size(case))
        share, shuffled = (
            rounds.spread(
                lambda seconds, roof, nbytes=nbytes: nbytes / seconds / roof, c, "bandwidth"
            )
            for c in (case, Case(seqs, True))
        )
        table.append(
            {
                "context": sum(seqs[0]),
                "batch": len(seqs),
                "microseconds": rounds.spread(lambda seconds: seconds * 1e6, case),
                "kv_gb_s": rounds.spread(
                    lambda seconds, nbytes=nbytes: nbytes / seconds / 1e9, case
                ),
                "roof_share": share,
                "target": verdict(share, minimum=TARGET),
                "shuffled_share": shuffled,
            }
        )
    roof = rounds.spread(lambda rate: rate / 1e9, "bandwidth")
    facts = shape._asdict() | {"kv_heads": shape.kv_heads, "roof_gb_s": roof}
    bench.table(
        "attention",
        f"decode, {name}; roof {roof.text('.1f')} GB/s",
        DECODE_COLUMNS,
        table,
        step="decode",
        **facts,
    )


def _report_prefill(
    bench: Bench,
    name: str,
    shape: Shape,
    rounds: Rounds,
    prefill: list[tuple[tuple[int, int], ...]],
) -> None:
    table = []
    for seqs in prefill:
        case = Case(seqs, False)
        flops = shape.op().flops(shape.size(case))
        share, shuffled = (
            rounds.spread(lambda seconds, roof, flops=flops: flops / seconds / roof, c, "rate")
            for c in (case, Case(seqs, True))
        )
        table.append(
            {
                "rows": seqs[0][1],
                "microseconds": rounds.spread(lambda seconds: seconds * 1e6, case),
                "g_operations_s": rounds.spread(
                    lambda seconds, flops=flops: flops / seconds / 1e9, case
                ),
                "roof_share": share,
                "shuffled_share": shuffled,
            }
        )
    roof = rounds.spread(lambda rate: rate / 1e9, "rate")
    facts = shape._asdict() | {"kv_heads": shape.kv_heads, "roof_g_operations_s": roof}
    bench.table(
        "attention",
        f"prefill, {name}; roof {roof.text(',.0f')} G operations/s",
        PREFILL_COLUMNS,
        table,
        step="prefill",
        **facts,
    )


if __name__ == "__main__":
    main(__doc__, attention)
