"""The choice of blocks that a row attends to (Quest, Tang et al. 2024), in NumPy."""

import numpy as np
from numpy.typing import NDArray

from headrace.backend_traits import KvDtype
from headrace.program.ops import Attention
from headrace.quant.kv import BLOCK_SIZE, bf16_above, hadamard, is_rotated

Floats = NDArray[np.float64]


def hidden_positions(
    op: Attention, dtype: KvDtype, q: Floats, keys: Floats, biases: Floats | None, first: int
) -> NDArray[np.bool]:
    """Return the positions that a row does not attend to, [KV heads, positions].

    q: queries of the row, [KV heads, heads of each, numbers].
    keys: stored keys of all positions up to the row's, [positions, KV heads, numbers].
    biases: what is added to the key of each position, of the same shape.
    first: the first visible position after the sinks.
    """
    num_seen = len(keys)
    hidden = np.zeros((op.num_kv_heads, num_seen), np.bool)
    candidates = np.arange(first // BLOCK_SIZE + 1, (num_seen - 1) // BLOCK_SIZE - 1)
    if len(candidates) <= op.top_blocks:
        return hidden

    ratings = _ratings(op, dtype, q, keys, biases, candidates)
    for head, order in enumerate(np.argsort(-ratings, axis=1, kind="stable")):
        for block in candidates[order[op.top_blocks :]]:
            hidden[head, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = True
    return hidden


def _ratings(
    op: Attention,
    dtype: KvDtype,
    q: Floats,
    keys: Floats,
    biases: Floats | None,
    candidates: NDArray[np.int64],
) -> Floats:
    """[KV heads, candidates]"""
    num_seen, blocks = len(keys), slice(candidates[0], candidates[-1] + 1)
    whole = keys[: num_seen // BLOCK_SIZE * BLOCK_SIZE]
    turned_q = q
    if is_rotated(dtype):
        whole, turned_q = whole @ hadamard(op.head_dim), q @ hadamard(op.head_dim)
    by_block = whole.reshape(-1, BLOCK_SIZE, *keys.shape[1:])[blocks]  # [blocks, tokens, heads, d]
    highest, lowest = bf16_above(by_block.max(axis=1)), -bf16_above(-by_block.min(axis=1))
    products = np.einsum("hgd,bhd->hgb", np.maximum(turned_q, 0), highest)
    products += np.einsum("hgd,bhd->hgb", np.minimum(turned_q, 0), lowest)
    if biases is not None:
        bias_products = np.einsum("hgd,shd->hgs", q, biases[: len(whole)])
        of_block = bias_products.reshape(*bias_products.shape[:2], -1, BLOCK_SIZE)
        products += of_block.max(axis=3)[..., blocks]

    scores = products * op.scale
    if op.softcap:
        scores = op.softcap * np.tanh(scores / op.softcap)
    slopes = np.array(op.slopes or [0.0] * op.num_heads).reshape(op.num_kv_heads, -1, 1)
    scores = scores - slopes * (num_seen - (candidates + 1) * BLOCK_SIZE)
    relative = scores - scores.max(axis=2, keepdims=True)
    best: Floats = relative.max(axis=1)
    return best
