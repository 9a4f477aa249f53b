"""Random models, and steps, for tests of ranks."""

from collections.abc import Iterable, Iterator

import numpy as np
from hypothesis import strategies as st

from headrace.batch import RaggedBatch
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.program.op import StepSize
from headrace.program.trace import Program
from tests.backend.batches import Sequence, batch_of
from tests.tiny import Tensors, tiny_model

_STEPS = [(5, 0), (3, 6), (1, 1), (1, 2)]
"""Tokens of each of two sequences, and the number of last rows with logits.

A step in the middle of all its prompts has no logits, so the last layer has no rows.
"""


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, Tensors]:
    """A tiny Llama with random heads, windows, weight format and tied or untied embedding."""
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads, head_dim = kv_heads * group, draw(st.sampled_from([4, 8, 32]))
    in_blocks = heads * head_dim % 32 == 0
    any_width = ["F32", "BF16", "I8_ROW", "bf16-2:4", "int8-row-2:4"]
    stored = draw(st.sampled_from(["Q4_0", "Q8_0", "int4-2:4"] if in_blocks else any_width))
    dim = 32 * draw(st.integers(1, 3))
    constants = {
        "head_dim": head_dim,
        "rope": RopeSpec(head_dim),
        "tied_embeddings": draw(st.booleans()),
    }
    sizes = {
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": 32 * draw(st.integers(1, 3)),
        "vocab": draw(st.integers(17, 70)),
    }
    return tiny_model(
        draw(st.integers(0, 9)),
        window=draw(st.sampled_from([0, 3, (0, 4)])),
        format=stored,
        **sizes,
        **constants,
    )


def predicted_seconds(program: Program, batch: RaggedBatch) -> float:
    """Seconds of a step on a machine that reads a byte per second."""
    rows = zip(batch.context_len, batch.row_start[1:] - batch.row_start[:-1], strict=True)
    step = StepSize(
        tuple((int(context), int(count)) for context, count in rows), len(batch.logit_rows), 4
    )
    return float(sum(op.bytes(step) for op in program.ops))


def steps(block_size: int, num_groups: int) -> Iterator[RaggedBatch]:
    """Steps of two sequences, with all, some and no logits."""
    sequences = [Sequence([1, 3], block_size), Sequence([2, 0], block_size)]
    for count, num_logits in _STEPS:
        tokens = [[(7 * i + 31 * b + count) % 101 for i in range(count)] for b in range(2)]
        batch = batch_of(sequences, tokens, [([], [])] * 2, False, num_groups)
        yield with_logits(batch, range(2 * count - num_logits, 2 * count))
        for sequence in sequences:
            sequence.computed += count


def with_logits(batch: RaggedBatch, rows: Iterable[int]) -> RaggedBatch:
    """A batch with logits for some of its rows, in ascending order."""
    chosen = np.array(sorted(rows), np.int32)
    return batch._replace(logit_rows=chosen, seq_of=batch.seq_of[chosen])
