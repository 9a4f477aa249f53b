"""Verifies draft trees by the samples at their nodes, and updates the counts for penalties."""

from typing import Any

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.sample_table import (
    COLUMNS,
    DRAFT_TOKEN,
    FIRST_SAMPLE,
    NUM_SAMPLES,
    ONCE,
    OP_COLUMNS,
    OP_INDEX,
    OP_STATE,
    PARENT,
)
from headrace.backend.cuda.launch import Launch


def sample_verify(
    table: Any,
    op_table: Any,
    tokens: Any,
    state: Any,
    last_tokens: Any,
    results: tuple[Any, Any, Any],
    nodes: int,
) -> Launch:
    """Write the tokens of each op, its path [samples] and their number [ops]; 0 if a row is not
    finite.

    The last token of each op goes to `last_tokens` by the op's index (0 if it has none), and all
    tokens to the `state` of its penalties. `nodes` is a power of two: the maximum rows of an op.
    """
    args = (table, op_table, tokens, state, state.stride(0), last_tokens, *results)
    return Launch(sample_verify_kernel, (len(op_table),), args, {"NODES": nodes, "num_warps": 1})


@triton.jit
def sample_verify_kernel(
    table, op_table, tokens, state, state_stride, last_tokens, out_tokens, out_path, out_counts,
    NODES: tl.constexpr,
):  # fmt: skip
    """Verify one op."""
    op = op_table + tl.program_id(0) * OP_COLUMNS
    first = tl.load(op + FIRST_SAMPLE)
    if first >= 0:
        rows = tl.arange(0, NODES)
        inside = rows < tl.load(op + NUM_SAMPLES)
        sampled = tl.load(tokens + first + rows, mask=inside, other=-1)
        parents = tl.load(table + (first + rows) * COLUMNS + PARENT, mask=inside, other=-2)
        drafted = tl.load(table + (first + rows) * COLUMNS + DRAFT_TOKEN, mask=inside, other=-1)
        row = 0 * first  # 1 + node
        depth = 0 * first
        token = tl.sum(tl.where(rows == 0, sampled, 0), 0)
        path_tokens = tl.where(rows == 0, token, -1)
        path = rows * 0
        is_going = (NODES > 1) & (token >= 0)
        while is_going:
            child = tl.min(
                tl.where((parents == row - 1) & (drafted == token) & (token >= 0), rows, NODES), 0
            )
            is_going = child < NODES
            if is_going:
                path = tl.where(rows == depth, child - 1, path)
                depth += 1
                row = child
                token = tl.sum(tl.where(rows == child, sampled, 0), 0)
                path_tokens = tl.where(rows == depth, token, path_tokens)
        is_finite = token >= 0
        tl.store(out_counts + tl.program_id(0), tl.where(is_finite, depth + 1, 0))
        tl.store(out_tokens + first + rows, path_tokens, mask=inside)
        tl.store(out_path + first + rows, path, mask=inside)
        tl.store(last_tokens + tl.load(op + OP_INDEX), tl.maximum(token, 0))
        slot = tl.load(op + OP_STATE)
        if slot >= 0:
            counts = state + slot.to(tl.int64) * state_stride
            tl.atomic_add(
                counts + path_tokens,
                rows * 0 + ONCE,
                mask=(rows <= depth) & is_finite,
                sem="relaxed",
            )
