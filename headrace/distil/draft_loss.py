"""The loss of a drafter: cross-entropy to the target's distribution over the drafter's tokens.

The gradients come with the loss, a block of rows at a time. So no [rows, tokens] logits are kept
for the backward pass. Several rows, one of each step, have one distribution W of the target. The
gradients are (P - W) head and (P - W)' rows, and the parts with W are computed once for all steps.
"""

from typing import Any

import torch
from torch import Tensor

_ROWS = 2048
"""Rows whose logits exist at once."""
_PADDING = 256


def padded(x: Tensor) -> Tensor:
    """Add zeros, so that the length of the first axis is a multiple of 256.

    oneDNN keeps a compiled product, with its memory, for each new number of rows.
    """
    num_added = -len(x) % _PADDING
    return torch.cat([x, x.new_zeros(num_added, *x.shape[1:])]) if num_added else x


class SoftCrossEntropy(torch.autograd.Function):
    """Sum of weights * cross-entropy over rows.

    Inputs: rows [N, dim], head [V, dim], wanted probabilities [M, V], their number `index` [N] for
    each row, and weights [N]. Products have the type of the probabilities, sums are in f32.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, head: Tensor, wanted: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        dtype = wanted.dtype
        matrix, weights = head.to(dtype), weights[:, None]
        pulls = (wanted @ matrix).float()  # [M, dim]
        weighted = rows.float() * weights
        pulled = torch.zeros_like(pulls).index_add_(0, index, weighted)
        d_rows = -pulls[index]
        d_head = -(wanted.T @ pulled.to(dtype)).float()
        total = (weighted * d_rows).sum()
        for start in range(0, len(rows), _ROWS):
            part = slice(start, start + _ROWS)
            logits = rows[part].to(dtype) @ matrix.T
            drafted = logits.softmax(-1)
            # The largest logit and its probability give the logarithm of the sum of exponentials.
            logs = logits.amax(-1).float() - drafted.amax(-1).float().log()
            total += (logs[:, None] * weights[part]).sum()
            d_rows[part] += drafted @ matrix
            d_head += drafted.T @ weighted[part].to(dtype)
        d_rows *= weights
        ctx.save_for_backward(d_rows.to(rows.dtype), d_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_rows, d_head = ctx.saved_tensors
        return grads[0] * d_rows, grads[0] * d_head, None, None, None
