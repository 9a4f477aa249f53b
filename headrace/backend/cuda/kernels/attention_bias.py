"""Key biases of attention, which are added to products instead of keys (`ops.Attention`)."""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.launch import power_of_2
from headrace.program.ops import Attention


@triton.jit
def load_factors(
    q, row, stride, head, valid, dims, biases, kv_head, DIM: tl.constexpr, PAIRS: tl.constexpr
):
    """What the rotated pairs of a key bias add to the product of a query and the key at position 0,
    and at a quarter turn of each pair: [queries, 2 * PAIRS] each, the pairs twice.
    """
    pair = kv_head * PAIRS + tl.arange(0, 2 * PAIRS) % PAIRS
    dim, mask = tl.load(dims + pair), valid[:, None]
    x, y = tl.load(biases + 2 * pair)[None, :], tl.load(biases + 2 * pair + 1)[None, :]
    at = q + (row * stride + head * DIM)[:, None] + dim[None, :]
    even, odd = tl.load(at, mask, 0.0), tl.load(at + 1, mask, 0.0)
    return even * x + odd * y, odd * x - even * y


@triton.jit
def turned(at_start, at_quarter, start, frequencies, kv_head, PAIRS: tl.constexpr):
    """The factors of cosines, then of sines, of positions counted from `start`."""
    wave = tl.arange(0, 2 * PAIRS)
    angle = start.to(tl.float64) * tl.load(frequencies + kv_head * PAIRS + wave % PAIRS)
    cos, sin = tl.cos(angle).to(tl.float32)[None, :], tl.sin(angle).to(tl.float32)[None, :]
    of_cosines, of_sines = at_start * cos + at_quarter * sin, at_quarter * cos - at_start * sin
    return tl.where((wave < PAIRS)[None, :], of_cosines, of_sines)


class KeyBias(NamedTuple):
    """The pairs of a key bias on the device, with zeros up to one number of pairs for each KV
    head. Their number is a power of two, at least 8.
    """

    dims: Any  # [KV heads, pairs] first of the two numbers, int32
    biases: Any  # [KV heads, pairs, 2] float32
    frequencies: Any  # [KV heads, pairs] radians for each position, float64
    waves: Any  # [KV heads, cosines and sines, split] of positions from the start of a split

    @classmethod
    def of(cls, op: Attention, bias: NDArray[np.float32], split: int) -> "KeyBias":
        """`bias`: [KV heads * head_dim]."""
        heads = [op.key_bias_pairs(head) for head in bias.reshape(op.num_kv_heads, op.head_dim)]
        num_pairs = power_of_2(max(map(len, heads)), 8)
        pairs = np.zeros((len(heads), num_pairs, 4))
        for row, head in zip(pairs, heads, strict=True):
            row[: len(head)] = np.array(head).reshape(-1, 4)
        angles = pairs[:, :, 1, None] * np.arange(split)
        parts = {
            torch.int32: pairs[:, :, 0],
            torch.float32: pairs[:, :, 2:],
            torch.float64: pairs[:, :, 1],
        }
        dims, biases, frequencies = (
            torch.tensor(part, dtype=dtype, device=DEVICE) for dtype, part in parts.items()
        )
        waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return cls(
            dims, biases, frequencies, torch.tensor(waves, dtype=torch.float32, device=DEVICE)
        )
